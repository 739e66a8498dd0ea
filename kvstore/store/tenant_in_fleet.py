"""One tenant's store among those of the same tenant on other hosts: it lends, borrows, and applies
what was deleted of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvstore.membership.base import Membership
from kvstore.membership.state_files import AppliedDeletes
from kvstore.model.member import NodeId
from kvstore.model.tenant import tenant_id
from kvstore.move.tenant_peers import TenantPeers
from kvstore.peer.lenders import Lenders
from kvstore.store.fleet_deletes import KeepsDeletes, KeptDeletes
from kvstore.store.tenants import Tenant
from kvstore.system.background import keep_running


class TenantInFleet:
    """Made once the store has started. Until `join`, it lends nothing."""

    def __init__(self, tenant: Tenant, lenders: Lenders, instance: str) -> None:
        """instance: of this start of the daemon."""
        self.id = tenant_id(tenant.name)
        self.store, self.metrics = tenant.store, tenant.metrics
        self.peers: TenantPeers | None = None
        self._lenders = lenders
        self._lender = tenant.store.lender(instance)
        self._lender.lane = tenant.lanes.tcp if tenant.lanes is not None else None
        self._lender.may_lend = lambda: self.kept is not None and self.kept.current
        self.kept: KeptDeletes | None = None
        self._running: list[asyncio.Task[None]] = []
        lenders.add(self.id, self._lender)

    def join(self, node: NodeId, peers: TenantPeers, stats: Callable[[], dict[str, Any]]) -> None:
        """Let prefixes come from other hosts. stats: what to tell of the fleet."""
        self.peers = peers
        self.store.join_fleet(node, peers, stats)

    async def apply_deletes(
        self, membership: Membership, node: NodeId, fleet: str, directory: Path | None
    ) -> None:
        """Apply what was deleted while this daemon was away, if the membership keeps that.

        directory: of the note how far; None: nothing here outlives a restart.
        """
        assert self.peers is not None
        if not isinstance(membership, KeepsDeletes):
            self._lender.may_lend = lambda: True
            return
        self.peers.doubtful = lambda: membership.doubtful
        self.store.deletes.settling = membership.settling
        kept = self.kept = KeptDeletes(
            membership,
            membership.deletes_of(self.id),
            node=node,
            deletes=self.store.deletes,
            told=self.peers,
            note=AppliedDeletes(directory, fleet) if directory is not None else None,
            metrics=self.metrics,
        )
        self.store.deletes.peers = kept
        self._lender.on_delete = kept.look
        await kept.start()
        self._keep("deletes", kept.run)

    def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        run = keep_running(name, work, self.metrics.task_failed)
        self._running.append(asyncio.create_task(run))

    async def close(self) -> None:
        """Lend and borrow nothing more; return when no other host reads any of it."""
        self._lenders.remove(self.id)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self.kept is not None:
            self.kept.close()
        if self.peers is not None:
            await self.peers.close()
        await self._lender.given_back()
