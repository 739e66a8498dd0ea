"""One store among those of other hosts: it lends, borrows, and knows who is there."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstore.membership.base import PING_S, Membership
from kvstore.membership.opening import open_membership
from kvstore.membership.state_files import AppliedDeletes, own_node_id, state_directory
from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.model.member import ENGINES_MAX, Member, NodeId, State
from kvstore.move.peers import Peers
from kvstore.peer.base import PeerIncompatible
from kvstore.peer.identity import Ourselves
from kvstore.peer.server import PeerServer
from kvstore.peer.tcp import TcpLink, dial
from kvstore.peer.trust import Trust
from kvstore.settings import Settings, parse_address, peer_listen_address
from kvstore.store.fleet_deletes import KeepsDeletes, KeptDeletes
from kvstore.store.store import Store
from kvstore.system.background import keep_running

logger = logging.getLogger(__name__)


class Fleet:
    """Made and started after the store has started. Raises ConfigError."""

    def __init__(self, settings: Settings, store: Store, metrics: Metrics, version: str) -> None:
        self._version = version
        self._settings = settings
        self._cluster = settings.cluster
        self._store = store
        self._metrics = metrics
        self._state = State.UP
        self._node = NodeId("")
        self._instance = secrets.token_hex(8)
        self._port = 0
        self._threads = ThreadPoolExecutor(self._cluster.threads, thread_name_prefix="kvstore-peer")
        self._ourselves = self._open_ourselves()
        self._lender = store.lender(self._instance)
        self._server = PeerServer(
            self._ourselves,
            self._lender,
            serve_reads=self._cluster.serve_reads,
            bytes_per_s=self._cluster.serve_bytes,
            refused=lambda word: metrics.peer_refused.labels(word).inc(),
            lent=lambda nbytes: metrics.peer_bytes.labels("lent").inc(nbytes),
        )
        self._peers: Peers | None = None
        self._membership: Membership | None = None
        self._running: list[asyncio.Task[None]] = []
        self._kept: KeptDeletes | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def _open_ourselves(self) -> Ourselves:
        cluster, trust = self._cluster, None
        if cluster.cert:
            trust = Trust(
                Path(cluster.cert),
                Path(cluster.key),
                Path(cluster.ca),
                lambda what, result: self._metrics.credential_reloads.labels(what, result).inc(),
            )
        sealed = trust is not None and cluster.bulk == "sealed"
        return Ourselves(cluster.fleet, self.member, trust, sealed)

    def member(self) -> Member:
        """Return what this daemon is now."""
        cluster = self._cluster
        return Member(
            self._node,
            self._instance,
            cluster.address or self._listening,
            version=self._version,
            zone=cluster.zone,
            state=self._state,
            engines=self._store.sessions.engines[:ENGINES_MAX],
            arena_bytes=self._settings.dram.capacity_bytes,
            file_bytes=self._settings.file.capacity_bytes * len(self._settings.file.paths),
        )

    @property
    def _listening(self) -> str:
        listen = peer_listen_address(self._cluster)
        assert listen is not None  # the settings say so
        host = f"[{listen[0]}]" if ":" in listen[0] else listen[0]
        return f"{host}:{self._port}"

    async def start(self) -> None:
        """Listen, meet the others, and let prefixes come from them."""
        listen = peer_listen_address(self._cluster)
        assert listen is not None
        self._node = await asyncio.to_thread(own_node_id, state_directory(self._settings))
        await self._server.start(*listen)
        self._port = self._server.port
        peers = self._peers = Peers(
            self._dial,
            self._node,
            self._metrics,
            time.monotonic,
            view_nbytes_max=self._cluster.view_bytes,
            zone=self._cluster.zone,
        )
        membership = self._membership = open_membership(
            self._settings,
            hello=self._hello,
            ping=self._answers,
            failed=self._metrics.task_failed,
        )
        membership.on_change(lambda: peers.know(membership.members()))
        self._lender.may_lend = lambda: self._kept is not None and self._kept.current
        await membership.join(self.member())
        peers.know(membership.members())
        self._store.join_fleet(self._node, peers, self.stats)
        await self._apply_deletes(membership, peers)
        self._keep("peers", peers.run)
        self._store.sessions.on_engines.append(self._tell)
        logger.info(
            "fleet=%s node=%s address=%s members=%d",
            self._cluster.fleet,
            self._node,
            self.member().address,
            len(membership.members()),
        )

    async def _apply_deletes(self, membership: Membership, peers: Peers) -> None:
        """Apply what was deleted while this daemon was away, if the membership keeps that."""
        if not isinstance(membership, KeepsDeletes):
            self._lender.may_lend = lambda: True
            return
        directory = state_directory(self._settings)
        note = AppliedDeletes(directory, self._cluster.fleet) if directory is not None else None
        deletes = self._store.deletes
        kept = self._kept = KeptDeletes(
            membership,
            node=self._node,
            deletes=deletes,
            told=peers,
            note=note,
            metrics=self._metrics,
        )
        deletes.peers = kept
        self._lender.on_delete = kept.look
        await kept.start()
        self._keep("deletes", kept.run)

    def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        run = keep_running(name, work, self._metrics.task_failed)
        self._running.append(asyncio.create_task(run))

    async def drain(self, within_s: float) -> bool:
        """Lend nothing more, and wait for what is under way, for so long at most. False: some of it
        will be cut off."""
        self._state = State.DRAINING
        self._server.drain()
        self._tell()
        return await self._server.lending.ended(within_s)

    async def close(self) -> None:
        """Leave the fleet."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*self._telling, return_exceptions=True)
        # First: who reads the last bytes of what was lent is not told yet that we are no member.
        await self._server.close()
        if self._membership is not None:
            await self._membership.leave()
        if self._peers is not None:
            await self._peers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, Any]:
        """Return what `kvstore members` shows."""
        lent = self._server.sent_nbytes
        members = self._peers.stats() if self._peers is not None else []
        for each in members:
            each["lent_bytes"] = lent.get(NodeId(each["node"]), 0)
        own = self.member()
        return {
            "fleet": self._cluster.fleet,
            "node": self._node,
            "instance": self._instance,
            "address": own.address,
            "state": str(own.state),
            "zone": own.zone,
            "engines": list(own.engines),
            "secured": self._security,
            "deletes": "kept" if self._kept is not None else "members only",
            "membership": self._membership.stats() if self._membership is not None else {},
            "view": self._peers.heads.stats() if self._peers is not None else {},
            "members": members,
        }

    @property
    def _security(self) -> str:
        """One word: sealed, tls (records travel clear), insecure, or loopback."""
        if self._ourselves.trust is not None:
            return "sealed" if self._ourselves.sealed else "tls"
        return "insecure" if self._cluster.insecure else "loopback"

    def _tell(self) -> None:
        """Tell the fleet what this daemon is now."""
        if self._membership is not None:
            task = asyncio.get_running_loop().create_task(self._membership.update(self.member()))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _dial(self, member: Member, deadline: float) -> TcpLink:
        return await self._dialled(member.address, deadline, expected=member.node)

    async def _dialled(
        self, address: str, deadline: float, *, expected: NodeId | None = None
    ) -> TcpLink:
        where = parse_address("address of a member", address)
        return await dial(
            where, self._ourselves, self._threads, expected=expected, deadline=deadline
        )

    async def _hello(self, address: str) -> Member:
        try:
            link = await self._dialled(address, time.monotonic() + PING_S)
        except PeerIncompatible as error:
            if error.peer is not None:  # this daemon itself, or another one with its id
                return error.peer
            raise
        await link.close()
        return link.peer

    async def _answers(self, member: Member) -> bool:
        """Say whether a member is there, whatever the engine of the membership says."""
        try:
            link = await self._dial(member, time.monotonic() + PING_S)
        except (KVStoreError, ConfigError):
            return False
        await link.close()
        return True
