"""One daemon among those of other hosts: it knows who is there, and each of its tenants lends to
the same tenant there, and borrows from it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from kvstore.membership.base import PING_S, Membership
from kvstore.membership.opening import open_membership
from kvstore.membership.state_files import own_node_id, state_directory
from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.model.member import ENGINES_MAX, Member, NodeId, State
from kvstore.model.tenant import DEFAULT_TENANT, TenantId, tenant_id
from kvstore.move.peers import Peers
from kvstore.move.tenant_peers import TenantPeers
from kvstore.peer.base import PeerIncompatible
from kvstore.peer.identity import Ourselves
from kvstore.peer.lenders import Lenders
from kvstore.peer.server import PeerServer
from kvstore.peer.tcp import TcpLink, dial
from kvstore.peer.trust import Trust
from kvstore.peer.wire import PROTOCOL
from kvstore.settings import Settings, parse_address, peer_listen_address
from kvstore.store.fleet_deletes import KeepsDeletes
from kvstore.store.links import Links
from kvstore.store.tenant_in_fleet import TenantInFleet
from kvstore.store.tenants import TENANTS_DIRECTORY, Tenant, Tenants, directories_of
from kvstore.system.background import keep_running
from kvstore.system.threads import Threads

logger = logging.getLogger(__name__)


class Fleet:
    """Made and started after the stores have started. Raises ConfigError."""

    def __init__(
        self, settings: Settings, tenants: Tenants, metrics: Metrics, version: str
    ) -> None:
        self._version = version
        self._settings = settings
        self._cluster = settings.cluster
        self._tenants = tenants
        self._metrics = metrics
        self._state = State.UP
        self._node = NodeId("")
        self._instance = secrets.token_hex(8)
        self._port = 0
        self._threads = Threads(self._cluster.threads, thread_name_prefix="kvstore-peer")
        self._ourselves = self._open_ourselves()
        self._lenders = Lenders()
        self._here: dict[str, TenantInFleet] = {}
        only = None if tenants.configured else tenants.get(DEFAULT_TENANT).store
        self._links = Links(settings, only.arena if only is not None else None)
        self._server = PeerServer(
            self._ourselves,
            self._lenders,
            serve_reads=self._cluster.serve_reads,
            bytes_per_s=self._cluster.serve_bytes,
            refused=lambda word: metrics.peer_refused.labels(word).inc(),
            lent=self._count_lent,
            movers=self._links.movers,
        )
        self._peers: Peers | None = None
        self._membership: Membership | None = None
        self._running: list[asyncio.Task[None]] = []
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
            protocol=PROTOCOL,
            features=tuple(self._links.movers),
            zone=cluster.zone,
            state=self._state,
            engines=tuple(self._engines())[:ENGINES_MAX],
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
        await self._links.start(self._node, sealed=self._ourselves.sealed)
        await self._server.start(*listen)
        self._port = self._server.port
        peers = self._peers = Peers(self._dial, self._node, self._metrics, time.monotonic)
        membership = self._membership = open_membership(
            self._settings,
            hello=self._hello,
            ping=self._answers,
            failed=self._metrics.task_failed,
        )
        membership.on_change(lambda: peers.know(membership.members()))
        for tenant in self._tenants:  # who is told of by now is not refused, but has to wait
            self._meet(tenant)
        await membership.join(self.member())
        peers.know(membership.members())
        await asyncio.gather(*map(self._begin, self._tenants))
        self._keep("peers", peers.run)
        self._tenants.elsewhere = self
        logger.info(
            "fleet=%s node=%s address=%s members=%d",
            self._cluster.fleet,
            self._node,
            self.member().address,
            len(membership.members()),
        )

    # ---- tenants: see `Elsewhere` --------------------------------------------------------------

    async def add(self, tenant: Tenant) -> None:
        """Let a tenant lend and borrow."""
        self._meet(tenant)
        await self._begin(tenant)
        self._tell()

    async def remove(self, tenant: Tenant) -> None:
        """Let a tenant neither lend nor borrow; return when nobody reads any of it."""
        here = self._here.pop(tenant.name, None)
        if here is not None:
            await here.close()
            self._share_views()
            self._tell()

    def _meet(self, tenant: Tenant) -> None:
        self._here[tenant.name] = TenantInFleet(tenant, self._lenders, self._instance)
        tenant.store.sessions.on_engines.append(self._tell)

    async def _begin(self, tenant: Tenant) -> None:
        assert self._peers is not None
        assert self._membership is not None
        here = self._here[tenant.name]
        peers = TenantPeers(
            self._peers,
            tenant.metrics,
            time.monotonic,
            tenant=here.id,
            zone=self._cluster.zone,
            lane=tenant.lanes.tcp if tenant.lanes is not None else None,
        )
        here.join(self._node, peers, lambda: self.stats(tenant.name))
        self._share_views()
        directory = self._notes_of(tenant.name)
        await here.apply_deletes(self._membership, self._node, self._cluster.fleet, directory)

    def _share_views(self) -> None:
        """Let what is known of others' blocks take no more than allowed, all tenants together."""
        there = [here.peers for here in self._here.values() if here.peers is not None]
        for peers in there:
            peers.heads.nbytes_max = self._cluster.view_bytes // len(there)

    def _notes_of(self, name: str) -> Path | None:
        """Return where it is noted how far a tenant's deletes are applied."""
        if self._cluster.state or not self._settings.file.paths:
            directory = state_directory(self._settings)
            if directory is None or name == DEFAULT_TENANT:
                return directory
            return directory / TENANTS_DIRECTORY / tenant_id(name).hex()
        return directories_of(self._settings, name)[0]

    def _count_lent(self, tenant: TenantId, nbytes: int) -> None:
        for here in self._here.values():
            if here.id == tenant:
                here.metrics.peer_bytes.labels("lent").inc(nbytes)

    def _engines(self) -> Iterable[str]:
        for tenant in self._tenants:
            yield from tenant.store.sessions.engines

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
        self._tenants.elsewhere = None
        # First: who reads the last bytes of what was lent is not told yet that we are no member.
        await self._server.close()
        await asyncio.gather(*(here.close() for here in self._here.values()))
        if self._membership is not None:
            await self._membership.leave()
        if self._peers is not None:
            await self._peers.close()
        await self._links.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def stats(self, name: str = "") -> dict[str, Any]:
        """Return what `kvstore members` shows to a tenant; "": to the operator of all."""
        here = self._here.get(name)
        own = self.member()
        if here is None or here.peers is None:
            members = self._peers.stats() if self._peers is not None else []
            views = [each.peers.heads.stats() for each in self._here.values() if each.peers]
            view = {key: sum(each[key] for each in views) for key in ("heads", "bytes")}
            view["level"] = max((each["level"] for each in views), default=0)
        else:
            members, view = here.peers.stats(), here.peers.heads.stats()
        lent: Counter[str] = Counter()
        for (node, tenant), nbytes in self._server.sent_nbytes.items():
            if here is None or here.id == tenant:
                lent[node] += nbytes
        engines = list(own.engines)
        if here is not None and self._tenants.configured:  # not what others have
            engines = list(here.store.sessions.engines)
            members = [{**each, "engines": []} for each in members]
        keeps = isinstance(self._membership, KeepsDeletes)
        return {
            "fleet": self._cluster.fleet,
            "node": self._node,
            "instance": self._instance,
            "address": own.address,
            "state": str(own.state),
            "zone": own.zone,
            "engines": engines,
            "secured": self._security,
            "links": self._links.stats(),
            "deletes": "kept" if keeps else "members only",
            "membership": self._membership.stats() if self._membership is not None else {},
            "view": view,
            "members": [{**each, "lent_bytes": lent[each["node"]]} for each in members],
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
        link = await self._dialled(member.address, deadline, expected=member.node)
        for name, mover in self._links.movers.items():
            if name in link.peer.features:
                link.read_onesided(mover)
                break
        return link

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
