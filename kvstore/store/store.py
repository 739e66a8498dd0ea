"""The control plane of one node.

A put is `puts.reserve` -> the client writes into the slots -> `puts.commit`; a get is
`gets.acquire` -> the client reads the slots -> `release`. The planner decides, `kvstore.move` moves
bytes, the leases know who may touch which slot. Everything runs on one event loop, so nothing here
needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.decide.ask import Ask
from kvstore.decide.index import Index
from kvstore.decide.planner import DAEMON_SESSION, Leases, Planner, SessionId
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Match, Namespace, NamespaceId, Slot
from kvstore.model.member import Holds, NodeId
from kvstore.move.deletions import Deletions
from kvstore.move.fetch import Fetch
from kvstore.move.file_leases import FileLeases
from kvstore.move.holes import Holes
from kvstore.move.promote import Promotion
from kvstore.move.scrub import Scrub
from kvstore.move.sources import Peers
from kvstore.move.verify import Verifier
from kvstore.move.write_behind import WriteBehind
from kvstore.settings import LimitSettings
from kvstore.store.acquire import Acquisition
from kvstore.store.announcing import Announcer
from kvstore.store.caps import Caps
from kvstore.store.deletes import Deletes, FleetDeletes
from kvstore.store.gets import Gets
from kvstore.store.handoff import Handoff
from kvstore.store.hints import Hints
from kvstore.store.history import History, time_of_day
from kvstore.store.node import Node
from kvstore.store.puts import Puts
from kvstore.store.report import Report
from kvstore.store.request_log import RequestLog
from kvstore.store.sessions import Namespaces, Sessions
from kvstore.store.staging import Staging
from kvstore.store.stats import ageless
from kvstore.store.tree import Tree
from kvstore.system.background import keep_running
from kvstore.tier.dram import Arena

if TYPE_CHECKING:  # a daemon without a bucket starts without what it takes to use one
    from kvstore.move.object_side import Objects
    from kvstore.move.pool_side import Pool
    from kvstore.store.lender import StoreLender  # one without a fleet, the same

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
DEMOTED_AHEAD = 16  # of the arena, one part may leave without waiting for the disk


def random_id() -> int:
    """Return 63 random bits, never 0."""
    return 1 + secrets.randbelow((1 << 63) - 1)


class OtherHosts(Peers, FleetDeletes, Protocol):
    """The rest of the fleet."""


class Store:
    """The tiers of one node behind one interface. Times are seconds of `now`."""

    def __init__(
        self,
        *,
        arena: Arena,
        write_behind: WriteBehind,
        planner: Planner,
        limits: LimitSettings,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
        new_id: Callable[[], int] = random_id,
        scrub: Scrub | None = None,
        objects: Callable[[Promotion, Deletions], Objects] | None = None,
        pool: Callable[[Deletions], Pool] | None = None,
        clock: Callable[[], float] = time_of_day,
    ) -> None:
        """new_id: as for `Leases`. objects, pool: make the node's object tier, and its side
        of a pool, if it has them. clock: seconds since the epoch."""
        self.node_id = NodeId("")  # of a fleet
        self.announcer: Announcer | None = None  # None: nothing is told to routers
        self._metrics = metrics
        self._leases = Leases(
            lease_s=limits.lease_s,
            limbo_bytes_max=0,
            sessions_max=limits.sessions_max,
            now=now,
            new_id=new_id,
            unpin=planner.unpin,
            unpin_frame=planner.unpin_frame,
        )
        self._promotion = Promotion(planner, write_behind.reads, metrics, now)
        deletions = Deletions()
        self._fetch = Fetch(planner, metrics, deletions=deletions, now=now)
        self._fetch.store = self
        self._objects = objects(self._promotion, deletions) if objects is not None else None
        if self._objects is not None:
            write_behind.on_written = self._objects.written
        node = self._node = Node(
            arena=arena,
            write_behind=write_behind,
            planner=planner,
            leases=self._leases,
            objects=self._objects,
            deletions=deletions,
            fetch=self._fetch,
            limits=limits,
            metrics=metrics,
            now=now,
            staging=Staging(arena) if arena.sealed else None,
            pool=pool(deletions) if pool is not None else None,
        )
        if node.staging is not None:
            self._leases.on_over.append(node.staging.over)
        self._wire(node, scrub)
        write_behind.namespace_notes.on_found = self.namespaces.learn
        self._tasks: list[asyncio.Task[None]] = []
        self._published: object = None
        self.history = History(metrics, write_behind.file, clock=clock)
        self.caps.set_bounds()

    def _wire(self, node: Node, scrub: Scrub | None) -> None:
        """Make the parts, each of those before it."""
        planner, write_behind, metrics = node.planner, node.write_behind, node.metrics
        planner.policies.failed = _policy_failed
        file_leases = self._file_leases = FileLeases(write_behind.reads, node.leases, nbytes_max=0)
        acquisition = self._acquisition = Acquisition(
            planner,
            self._promotion,
            write_behind,
            node.leases,
            fetch=node.fetch,
            bucket=node.objects.source if node.objects is not None else None,
            pool=node.pool.source if node.pool is not None else None,
            leasable_bytes=0,
            now=node.now,
        )
        log = RequestLog(
            planner,
            node.leases,
            metrics,
            outcomes_max=node.limits.outcomes_max,
            now=node.now,
            slow=node.slow,
            answers=node.answers,
        )
        self._request_log = log
        self._scrub = scrub
        self._holes = Holes(planner, write_behind, node.arena, metrics, node.now)
        self.hints = Hints(
            planner,
            write_behind,
            acquisition,
            metrics,
            pinned_bytes_max=0,
            pin_ttl_max_s=node.limits.pin_ttl_max_s,
            recall=node.recall,
            now=node.now,
        )
        self.namespaces = Namespaces(node)
        self.sessions = Sessions(node)
        self.gets = Gets(
            node,
            promotion=self._promotion,
            acquisition=acquisition,
            file_leases=file_leases,
            hints=self.hints,
            request_log=log,
            handoff=Handoff(node, self._is_own),
        )
        self.puts = Puts(node, self.hints)
        self.deletes = Deletes(node, Verifier(planner, write_behind, metrics, node.now))
        self.caps = Caps(node, acquisition, file_leases, self.hints, scrub)
        self.report = Report(node, self.puts, log)
        self.tree = Tree(planner.index, node.uses, node.now)
        self.slow, self.answers = node.slow, node.answers

    def lender(self, instance: str) -> StoreLender:
        """Return this store as other hosts see it. Call it once. instance: of this start."""
        from kvstore.store.lender import StoreLender

        return StoreLender(
            self._node,
            namespaces=self.namespaces,
            promotion=self._promotion,
            acquisition=self._acquisition,
            file_leases=self._file_leases,
            deletes=self.deletes,
            instance=instance,
        )

    def join_fleet(
        self, node: NodeId, peers: OtherHosts, stats: Callable[[], dict[str, Any]]
    ) -> None:
        """Let prefixes come from other hosts, too. node: the id of this one."""
        self.node_id = node
        self._acquisition.sources.peers = peers
        self.deletes.peers = peers
        self.report.fleet = stats

    async def elsewhere(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        skip_blocks: int,
        *,
        recompute_s_per_block: float,
        refined: bool,
        wait_s: float,
    ) -> int:
        """Return how long a prefix would be with what other hosts have of it, 0 without any. The
        namespace need not be registered here. wait_s: at most, whatever hosts far away need."""
        peers, now = self._acquisition.sources.peers, self._node.now()
        ask = Ask(
            DAEMON_SESSION,
            "",
            "",
            namespace.id,
            keys,
            skip_blocks,
            now,
            recompute_s_per_block,
            refined=refined,
        )
        match = Match(skip_blocks, skip_blocks)
        if peers is None or not peers.may_have(ask, namespace, match):
            return 0
        return await peers.reach(ask, namespace, match, now + wait_s)

    def announce(self, announcer: Announcer | None) -> Index:
        """Tell somebody the tokens of blocks from now on, None for nobody; returns the index, for
        whoever is to be told what changes in it."""
        self.announcer = announcer
        return self._node.planner.index

    def holders(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], most: int
    ) -> list[Holds]:
        """Return which other hosts seem to have some of a prefix, longest first. Asks nobody."""
        peers = self._acquisition.sources.peers
        spec = self._node.planner.index.namespaces.spec(namespace_id)
        return (
            peers.seem_to_have(spec, keys, most) if peers is not None and spec is not None else []
        )

    def _is_own(self, source: str, asker: SessionId) -> bool:
        """Say whether that is this daemon, or an engine that it serves beside the asker."""
        return source == self.node_id or self.sessions.serves(source, besides=asker)

    @property
    def arena(self) -> Arena:
        return self._node.arena

    @property
    def limits(self) -> LimitSettings:
        return self._node.limits

    @property
    def now(self) -> Callable[[], float]:
        """The clock of this store, in seconds from an arbitrary zero."""
        return self._node.now

    @property
    def is_busy(self) -> bool:
        """Whether somebody holds or owes something here."""
        return bool(self._leases.count or self._node.planner.dirty.count)

    async def start(self, *, house: bool = True) -> None:
        """Open the tiers and index what they hold. house: False if somebody else calls
        `keep_house`, about twice a second."""
        await self._node.arena.start()
        await self._node.write_behind.start()
        self.history.every_sample = house
        self.history.start()
        self._publish()
        if house:
            self._keep("house", self._keep_house)
            self._keep("holes", self._holes.run)
        self._keep("cap", self.caps.keep)
        if self._objects is not None:
            self._objects.start()
        if self._node.pool is not None:
            self._node.pool.start()
        if self._scrub is not None:
            self._keep("scrub", self._scrub.run)

    def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        task = keep_running(name, work, self._metrics.task_failed)
        self._tasks.append(asyncio.create_task(task))

    async def close(self, drain_s: float = 10.0, *, retire: bool = False) -> None:
        """Flush for at most `drain_s` and close the tiers. retire: the arena's memory goes back to
        the system even if clients keep it mapped; the caller watches the arena, and closes it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.hints.close()
        await self._fetch.close()
        self._promotion.close()
        self.tree.close()
        await self.deletes.close()
        if self._node.pool is not None:
            await self._node.pool.close()
        if self._objects is not None:
            await self._node.write_behind.flush(self._node.now() + drain_s)
            await self._objects.close(drain_s)
        self._leases.let_go_of_frames()
        if self._node.staging is not None:
            self._node.staging.close()
        await self.history.close()
        try:
            await self._node.write_behind.close(drain_s)
        finally:
            await (self._node.arena.retire() if retire else self._node.arena.close())

    def in_use(self, namespace_id: NamespaceId) -> AbstractContextManager[None]:
        """Let a namespace not be forgotten during a call in it. Raises UnknownNamespace."""
        return self._node.in_use(namespace_id)

    def release(self, session: SessionId, lease_ids: Sequence[int]) -> list[bool]:
        """End leases, or abandon reservations. True: the slots were the caller's until now."""
        held = [self._leases.release(session, lease_id) for lease_id in lease_ids]
        for lease_id, safe in zip(lease_ids, held, strict=True):
            self._request_log.released(session, lease_id, held=safe)
        self._node.room.set()
        return held

    async def end_uploads(self) -> None:
        """Upload nothing from now on, at the end neither."""
        if self._objects is not None:
            await self._objects.end_uploads()

    def ask_room(self, ask: Callable[[int], Awaitable[None]]) -> None:
        """Ask for room before a put evicts anything: what others have borrowed comes back first."""
        self._node.ask_room = ask

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes, for whoever holds a lease on it."""
        return self._node.arena.view(slot)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self.keep_house()

    async def keep_house(self) -> None:
        """End leases that are over, let hints go on, write ahead, set bounds and gauges."""
        expired = self._leases.expire()
        if expired:
            self._metrics.expired_leases.inc(expired)
            logger.warning("leases_expired=%d limbo_bytes=%d", expired, self._leases.limbo_bytes)
        self.hints.tick()
        self._node.planner.eviction.write_ahead(self._node.arena.capacity_bytes // DEMOTED_AHEAD)
        if self._node.planner.dirty.count:
            self._node.write_behind.wake()
        self._metrics.touched_again_bytes.inc(await self._node.arena.holes.renew())
        self.caps.set_bounds()
        self.history.tick(self._publish())

    async def look_for_holes(self) -> None:
        """Fill holes that clients have punched into the arena, and drop what was in them."""
        await self._holes.look()

    def _publish(self) -> dict[str, Any]:
        """Set the gauges, unless nothing has changed: an idle tenant costs next to nothing. Returns
        the stats."""
        stats, left = self.report.stats(), dict(self._node.planner.counts.left)
        now = (ageless(stats), left)
        if now != self._published:
            self._published = now
            self._metrics.publish(stats, left)
        return stats


def _policy_failed(tier: str, error: Exception) -> None:
    """Say that `lru` has taken the place of a policy."""
    logger.error("tier=%s policy=failed now=lru", tier, exc_info=error)
