"""One host of the fleet: a store with its disks and engines, from one start to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.membership.base import PING_S, NodeIdTaken
from kvstore.membership.etcd import DAY_S, EtcdMembership
from kvstore.membership.state_files import AppliedNote
from kvstore.model.block import BlockKey, NamespaceId, Span
from kvstore.model.errors import KVStoreError
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.member import Member, NodeId, State
from kvstore.model.tenant import NO_TENANT_ID
from kvstore.move.peers import Peers
from kvstore.move.tenant_peers import TenantPeers
from kvstore.sealing import Sealing
from kvstore.settings import ClusterSettings
from kvstore.store.fleet_deletes import KeptDeletes
from kvstore.store.lender import StoreLender
from kvstore.system.background import keep_running
from tests.sim.daemon import Daemon, Settings
from tests.sim.fleet.bucket import SimBucket
from tests.sim.fleet.daemon import ORDER, FleetDaemon, World
from tests.sim.fleet.etcd import CLIENT
from tests.sim.fleet.link import SimLink, dial
from tests.sim.fleet.serving import SimServer
from tests.sim.fleet.truth import HostModel
from tests.sim.loop import OWNER
from tests.sim.model import Item, Violation
from tests.sim.sealing import ROOT
from tests.sim.side import DRAIN_S, Side

T = TypeVar("T")
TTL_S = 6.0
NEW, NEW_BLOCKS = 99, 4  # a chain of one head, beside those of the space
CLOCKS_DIFFER_S = 5 * 3600.0
ZONES = ("east", "west", "")


class Told(Enum):
    """What became of a second daemon with a node id."""

    REFUSED = "refused"
    TAKEN = "taken"  # the id is its own now
    NOTHING = "nothing"  # the engine of the membership did not answer


class LastMembers:
    """members.json, on a disk that keeps what was synced."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def read(self) -> list[Member]:
        return list(self._members)

    def write(self, members: list[Member]) -> None:
        self._members = list(members)


class AppliedDeletes:
    """deletes.json, on such a disk."""

    def __init__(self) -> None:
        self._note: AppliedNote | None = None

    def read(self) -> AppliedNote | None:
        return self._note

    def write(self, revision: int, tokens: Sequence[str]) -> None:
        self._note = AppliedNote("default", revision, list(tokens))


class _Told:
    """The members of a fleet, who are told of deletes; and the model, who they are."""

    def __init__(self, tenant: TenantPeers) -> None:
        self._tenant = tenant

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        ORDER.get().listed = frozenset(peer.member.node for peer in self._tenant)
        await self._tenant.delete(namespace_id, keys)


class Host(Side):
    """See the module. up: it serves, since `began_at` or later. node: its id, which outlives its
    lives. kept: what etcd keeps of deletes, as this life applies it."""

    def __init__(self, world: World, number: int, settings: Settings, *, with_bucket: bool) -> None:
        self.number = number
        self.node = NodeId(f"{number + 1:032x}")
        self.name = f"host {number}"
        self.lives = 0
        self.up = False
        self.began_at = 0.0
        self.kept: KeptDeletes | None = None
        self.with_bucket = with_bucket
        self.server: SimServer | None = None
        self.peers: Peers | None = None
        self.membership: EtcdMembership | None = None
        self._world = world
        self._last = LastMembers()
        self._applied = AppliedDeletes()
        self._state = State.UP
        self._instance = ""
        self._ahead_s = 0.0
        self._tending: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._context = Context()
        model = HostModel(world.truth, self.node)
        super().__init__(world.loop, world.draw, settings, model, world.note)

    @property
    def fleet_daemon(self) -> FleetDaemon:
        assert isinstance(self.daemon, FleetDaemon)
        return self.daemon

    @property
    def owner(self) -> str:
        return f"{self.name} life {self.lives}"

    def now(self) -> float:
        """Its own clock: hours from others', and another one after each start."""
        return self._loop.time() + self._ahead_s

    def member(self) -> Member:
        return Member(
            self.node,
            self._instance,
            f"10.0.0.{self.number + 1}:7702",
            zone=ZONES[self.number % len(ZONES)],
            state=self._state,
            engines=self.daemon.store.sessions.engines,
        )

    # ---- start -----------------------------------------------------------------------------------

    async def run_in_own(self, work: Awaitable[T]) -> T:
        """Do something as this life of the host: the tasks that it makes belong to it."""
        return await self.start_in_own(_awaited(work))

    def start_in_own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._loop.create_task(work, context=self._context.copy())

    async def begin(self) -> None:
        """Start: recover, join the fleet, serve engines."""
        self.lives += 1
        self.began_at, self.kept = self._loop.time(), None
        context = self._context = Context()
        context.run(OWNER.set, self.owner)
        context.run(CLIENT.set, (self._world.etcd, self.node))
        self._ahead_s = self._draw.uniform(-CLOCKS_DIFFER_S, CLOCKS_DIFFER_S)
        self._instance = f"{self._draw.getrandbits(64):016x}"
        self._state = State.UP
        if self.server is not None:
            self.server.silent = False  # its machine answers again, though for another process
        await self.run_in_own(self._begun())

    async def _begun(self) -> None:
        await self.recover(again=self.lives > 1)
        daemon, world = self.fleet_daemon, self._world
        lender = daemon.store.lender(self._instance)
        lender.may_lend = lambda: self.kept is not None and self.kept.current
        self.server = SimServer(
            world.network, self.member, lender, copy_context(), daemon.read_file
        )
        zone = self.member().zone
        peers = self.peers = Peers(self._dial, self.node, daemon.metrics, self.now)
        tenant = TenantPeers(peers, daemon.metrics, self.now, zone=zone)
        membership = self.membership = self._new_membership(self._last)
        membership.on_change(lambda: peers.know(membership.members()))
        try:
            await membership.join(self.member())
        except NodeIdTaken as error:
            world.note(Violation("bug", f"its own earlier start keeps it away: {error}"))
            return
        peers.know(membership.members())
        daemon.store.join_fleet(self.node, tenant, dict)
        kept = await self._apply_deletes(lender, tenant)
        failed = daemon.metrics.task_failed
        self._tending = [
            asyncio.create_task(keep_running("deletes", kept.run, failed)),
            asyncio.create_task(keep_running("peers", peers.run, failed)),
        ]
        daemon.store.sessions.on_engines.append(self._tell)
        self.wire.arrive(daemon)
        self.up = True

    async def _apply_deletes(self, lender: StoreLender, tenant: TenantPeers) -> KeptDeletes:
        """Apply what was deleted meanwhile, as `TenantInFleet` does."""
        daemon, membership = self.fleet_daemon, self.membership
        assert membership is not None
        tenant.doubtful = lambda: membership.doubtful
        kept = self.kept = KeptDeletes(
            membership,
            membership.deletes_of(NO_TENANT_ID),
            node=self.node,
            deletes=daemon.store.deletes,
            told=_Told(tenant),
            note=self._applied,  # type: ignore[arg-type]
            metrics=daemon.metrics,
            now=self.now,
        )
        daemon.store.deletes.peers = kept
        daemon.store.deletes.settling = membership.settling
        lender.on_delete = kept.look
        await kept.start()
        return kept

    def new_daemon(self) -> Daemon:
        """The store of one life."""
        settings, world = self._settings, self._world
        return FleetDaemon(
            world,
            SimBucket(world.objects) if self.with_bucket else None,
            self._loop,
            self.platters,
            self.model,
            self._draw,
            settings,
            sealing=Sealing(ROOT) if settings.encrypted else None,
            now=self.now,
        )

    async def _dial(self, member: Member, deadline: float) -> SimLink:
        return await dial(self._world.network, member, self.node, self.now, deadline)

    async def _answers(self, member: Member) -> bool:
        try:
            link = await self._dial(member, self.now() + PING_S)
        except KVStoreError:
            return False
        await link.close()
        return True

    def _tell(self) -> None:
        if self.membership is not None:
            task = asyncio.create_task(self.membership.update(self.member()))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def start_twin(self) -> Told:
        """Let a daemon at another address try to join with this node id, and leave again."""
        context = Context()
        context.run(CLIENT.set, (self._world.etcd, "twin"))
        member = replace(self.member(), instance="f" * 16, address="10.0.9.9:7702")
        return await self._loop.create_task(self._joined(member), context=context)

    async def _joined(self, member: Member) -> Told:
        membership = self._new_membership(LastMembers())
        try:
            await membership.join(member)
        except NodeIdTaken:
            return Told.REFUSED
        taken = membership.stats()["registered"]
        await membership.leave()
        return Told.TAKEN if taken else Told.NOTHING

    def _new_membership(self, last: LastMembers) -> EtcdMembership:
        return EtcdMembership(
            ClusterSettings(
                etcd="http://etcd:2379",
                etcd_ttl_s=TTL_S,
                deletes_kept_days=self._world.kept_s / DAY_S,
            ),
            ping=self._answers,
            last=last,  # type: ignore[arg-type]
            failed=self.daemon.metrics.task_failed,
            now=self.now,
        )

    # ---- end -------------------------------------------------------------------------------------

    async def crash(self) -> None:
        """Be killed, most often by a power cut."""
        self.up = False
        self.kill()
        power = self._draw.random() < 0.7 or any(platter.dropped for platter in self.platters)
        assert self.server is not None
        self._gone(silent=power)
        while tasks := self._loop.tasks_of(self.owner):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
        await self.bury()
        if power:
            self.lose_power()
        self.ended()

    def _gone(self, *, silent: bool) -> None:
        network = self._world.network
        assert self.server is not None
        self.server.die(silent=silent)
        for link in sorted(network.links, key=lambda link: link.number):
            if link.source == self.node:
                link.abandon()

    async def drain(self, engines: Sequence[asyncio.Task[None]]) -> None:
        """Stop as a daemon does at SIGTERM, and see that nothing of it is left."""
        self.up = False
        for task in engines:
            task.cancel()
        await asyncio.gather(*engines, return_exceptions=True)
        self.wire.daemon = None
        self.wire.grounded()
        await self.run_in_own(self._drained())
        # A server waits for what it has cancelled when it is closed.
        if ending := [task for task in self._loop.tasks_of(self.owner) if task.cancelling()]:
            await asyncio.wait(ending, timeout=1.0)
        left = self._loop.tasks_of(self.owner)
        if left:
            self._note(Violation("leaked", f"{len(left)} tasks outlive a drain: {left[0]!r}"[:300]))

    async def _drained(self) -> None:
        assert self.server is not None
        assert self.membership is not None
        assert self.peers is not None
        self._state = State.DRAINING
        self.server.draining = True
        self._tell()
        await asyncio.sleep(DRAIN_S)  # what was being carried out ends
        self.wire.cut_off()
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        if self.kept is not None:
            self.kept.close()
        await asyncio.gather(*self._telling, return_exceptions=True)
        await self.membership.leave()
        await self.peers.close()
        if self.server.loans:
            self._note(Violation("leaked", f"{self.server.loans} loans outlive a drain"))
        links = [link for link in self._world.network.links if link.source == self.node]
        if links:
            self._note(Violation("leaked", f"{len(links)} links outlive a drain"))
        self._gone(silent=False)
        await self.close()

    # ---- what it has at rest ---------------------------------------------------------------------

    async def put_anew(self) -> list[BlockKey]:
        """Put a prefix that nobody has, as an engine would; return its keys."""
        daemon, space = self.fleet_daemon, self.model.space
        tokens = space.spec.block_tokens
        chain = KeyChain(root_key(space.spec.id), tokens).update([NEW] * tokens * NEW_BLOCKS)
        spans = tuple(Span(part, 0, NEW_BLOCKS) for part in space.bases)
        made = [
            self.model.write(Item(key, part), space.nbytes(part, 0, self._draw))
            for part in space.bases
            for key in chain
        ]
        sizes = [len(version.data) for version in made] if space.spec.varies else []
        reserve = partial(daemon.reserve, spans=spans, sizes=sizes, refined=False)
        grant = await reserve(DAEMON_SESSION, chain, 0, None)
        for slot, version in zip(grant.slots, made, strict=True):
            assert slot is not None, "at rest there is room"
            daemon.arena.view(slot)[:] = version.data
        self.model.publish(made)
        sums = [version.checksum for version in made]
        await daemon.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums)
        return chain

    async def hit_of(self, keys: Sequence[BlockKey]) -> int:
        """Return how long a prefix hits."""
        daemon = self.fleet_daemon
        grant = await daemon.acquire(DAEMON_SESSION, keys, None, 1)
        daemon.store.release(DAEMON_SESSION, [grant.lease_id])
        return grant.hit_blocks

    # ---- looks -----------------------------------------------------------------------------------

    def look(self) -> None:
        super().look()
        (failures,) = self.daemon.metrics.task_failures.collect()
        failed = [s.labels for s in failures.samples if s.name.endswith("_total") and s.value]
        if failed:
            self._note(Violation("bug", f"a background task has failed: {failed}"))

    def look_at_rest(self, others: Sequence[Host]) -> None:
        """See that after a quiet while nothing is under way, and that it knows all who are up."""
        assert self.peers is not None
        assert self.membership is not None
        node = self.daemon.store._node
        arrivals, deletions, fetch = node.arrivals, node.deletions, node.fetch
        left = {
            "waits": arrivals._waits + len(arrivals._waiting),
            "watches": len(deletions._deletions),
            "deletes": len(deletions._deletes),
            "fetches": len(fetch._under_way),
            "leases": self.daemon.store._leases.count,
            "loans": self.server.loans if self.server is not None else 0,
        }
        if any(left.values()):
            self._note(Violation("leaked", f"after a quiet while: {left}"))
        there = {host.node for host in others}
        if set(self.membership.members()) != there:
            missing = len(there - set(self.membership.members()))
            self._note(Violation("hung", f"{missing} members are missing, or some are too many"))
        down = [p for p in self.peers if not p.usable and not p.quarantined]
        if down:
            self._note(Violation("hung", f"{self.name} does not use {down[0].status()}"[:400]))


async def _awaited(work: Awaitable[T]) -> T:
    return await work
