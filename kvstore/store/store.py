"""One node's store: the file to read first.

A put is `reserve` -> the client writes into the slots -> `commit`; a get is `acquire` -> the client
reads the slots -> `release`. The planner decides, `kvstore.move` moves bytes, the leases know who
may touch which slot. Everything runs on one event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvstore.decide.ask import Ask
from kvstore.decide.index import HeldSlot, StoredPart
from kvstore.decide.namespaces import UNKNOWN_MODEL, NamespaceUse
from kvstore.decide.planner import (
    Leases,
    MemberId,
    Planner,
    Reservation,
    SessionId,
    Steps,
    needed_spans,
)
from kvstore.metrics import Metrics
from kvstore.model.block import (
    BlockKey,
    Committed,
    Grant,
    Match,
    Namespace,
    NamespaceId,
    Slot,
    Span,
    check_keys,
    padded,
)
from kvstore.model.errors import ConfigError, InvalidRequest, KVStoreError, Unavailable
from kvstore.model.outcome import Explanation, Outcome, Reason
from kvstore.move.file_leases import NOTHING_LENT, FileLeases
from kvstore.move.holes import Holes
from kvstore.move.promote import Promotion
from kvstore.move.scrub import Scrub
from kvstore.move.verify import Verifier
from kvstore.move.write_behind import WriteBehind
from kvstore.settings import LimitSettings, Settings
from kvstore.store.acquire import Acquisition, span_nbytes
from kvstore.store.hints import Hints
from kvstore.store.request_log import RequestLog
from kvstore.store.stats import snapshot
from kvstore.system.background import keep_running
from kvstore.system.memory import check_capacity, read_memory
from kvstore.tier.dram import Arena

if TYPE_CHECKING:  # a daemon without a bucket starts without what it takes to use one
    from kvstore.move.object_side import Objects

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOUSEKEEPING_S = 0.5
SHRINK_AGAIN_S = 0.1
SHED_STEP_NBYTES = 256 << 20
DEMOTED_AHEAD = 16  # of the arena, one part may leave without waiting for the disk
RECALL_STEP_KEYS = 64
RECALL_S_MAX = 300.0  # a million blocks take some seconds
REFUSES_S = 5.0  # for which every put is refused, before the node says that it takes none
FULL_FRACTION = 0.95  # of the arena, held by clients: what is left is gaps
SPANS_MAX = 4096
RECORDS_MAX = 1 << 18  # in one call: the answer has a slot for each
BLOCK_INDEX_MAX = (1 << 32) - 1


class Member(NamedTuple):
    """One process of a session, alive while its arena socket is open."""

    session: SessionId
    id: MemberId


def random_id() -> int:
    """Return 63 random bits, never 0."""
    return 1 + secrets.randbelow((1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class ScanItem:
    """A stored block as `scan` shows it. nbytes: of all its parts, uncompressed."""

    key: BlockKey
    namespace_id: NamespaceId
    block_index: int
    nbytes: int
    resident: bool
    durable: bool


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
        objects: Callable[[Promotion], Objects] | None = None,
    ) -> None:
        """new_id: as for `Leases`. objects: makes the node's object tier, if it has one."""
        self.arena = arena
        self._scrub = scrub
        self._write_behind = write_behind
        self._planner = planner
        self.limits = limits
        self._metrics = metrics
        self._now = now
        self._room = asyncio.Event()
        self._resized = asyncio.Event()
        self._waiting_for_room = 0
        self._started = now()
        self._refuses_since: float | None = None
        self._leases = Leases(
            lease_s=limits.lease_s,
            limbo_bytes_max=0,
            sessions_max=limits.sessions_max,
            now=now,
            new_id=new_id,
            unpin=planner.unpin,
            unpin_frame=planner.unpin_frame,
        )
        self._file_leases = FileLeases(write_behind.reads, self._leases, nbytes_max=0)
        self._answers = RequestLog(
            planner, self._leases, metrics, outcomes_max=limits.outcomes_max, now=now
        )
        self._promotion = Promotion(planner, write_behind.reads, metrics, now)
        self._verifier = Verifier(planner, write_behind, metrics, now)
        self._holes = Holes(planner, write_behind, arena, metrics, now)
        self._objects = objects(self._promotion) if objects is not None else None
        if self._objects is not None:
            write_behind.on_written = self._objects.written
        write_behind.namespace_notes.on_found = self._learn
        self._acquisition = Acquisition(
            planner,
            self._promotion,
            write_behind.reads,
            self._leases,
            self._objects,
            leasable_bytes=0,
            now=now,
        )
        self.hints = Hints(
            planner,
            write_behind,
            self._acquisition,
            metrics,
            pinned_bytes_max=0,
            pin_ttl_max_s=limits.pin_ttl_max_s,
            recall=self._recall,
            now=now,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._set_bounds()

    async def check(self, settings: Settings) -> None:
        """Raise ConfigError on what `reconfigure` could not carry out."""
        self._write_behind.check_file_caps(settings.file.capacity_bytes)
        capacity = settings.dram.capacity_bytes
        specs = [each.spec for each in self._planner.index.namespaces if each.spec is not None]
        records = [group.record_nbytes for spec in specs for group in spec.groups]
        if max(records, default=0) > capacity:
            raise ConfigError(
                f"dram.capacity={capacity} is less than a record of {max(records)} bytes, which "
                "engines use now"
            )
        if capacity > self.arena.capacity_bytes:
            memory = await asyncio.to_thread(read_memory)
            check_capacity(capacity, memory, self.arena.reserved_nbytes)

    def reconfigure(self, settings: Settings) -> None:
        """Take what of the settings can change while the node runs. `check` them first."""
        file = settings.file
        self.limits = settings.limits
        self.arena.set_capacity(settings.dram.capacity_bytes)
        self._resized.set()
        self._write_behind.set_file_caps(file.capacity_bytes, file.free_bytes_min)
        self._write_behind.group_commit_bytes = self.limits.group_commit_bytes
        self._planner.admission.set_budget(file.write_bytes_per_day)
        if self._scrub is not None:
            self._scrub.nbytes_per_s, self._scrub.every_s = file.scrub_bytes, file.scrub_every_s
        self._set_bounds()
        if self._objects is not None:
            self._objects.set_bounds(
                capacity_bytes=settings.object.capacity_bytes,
                fetch_nbytes_max=self._acquisition.leasable_bytes,
            )
        self._room.set()

    def over_caps(self) -> str:
        """Say what a lowered cap waits for, "" if every cap is kept."""
        excess = max(0, self.arena.reserved_nbytes - self.arena.capacity_bytes)
        if not excess:
            return self._write_behind.over_cap()
        limbo = self._leases.limbo_bytes
        return (
            f"the arena is {excess} bytes over dram.capacity; leases hold "
            f"{self._leases.leased_bytes - limbo} bytes of it, limbo {limbo}, and "
            f"{self._planner.dirty.nbytes} wait to be written"
        )

    async def _keep_cap(self) -> None:
        """Give memory back under a lowered cap: what is free, then what is evicted for it."""
        while True:
            while self.arena.excess_nbytes and await self._shrink():  # noqa: ASYNC110
                await asyncio.sleep(0)  # others' turn
            over = self.arena.reserved_nbytes > self.arena.capacity_bytes
            waits = SHRINK_AGAIN_S if over else None
            self._resized.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waits):
                    await self._resized.wait()

    async def _shrink(self) -> bool:
        """Give some memory back. False: everything that is left is held, or to be written."""
        if await self.arena.give_back():
            return True
        nbytes = min(self.arena.excess_nbytes, SHED_STEP_NBYTES)
        self._planner.eviction.write_ahead(self.arena.excess_nbytes)
        self._write_behind.wake()
        return self._planner.eviction.shed(nbytes) > 0

    def _set_bounds(self) -> None:
        """Derive from limits and caps what each part may hold."""
        limits, arena_bytes = self.limits, self.arena.capacity_bytes
        if self.arena.waits_for_memory:
            arena_bytes = min(arena_bytes, self.arena.reserved_nbytes)
        self._leases.lease_s = limits.lease_s
        self._leases.sessions_max = limits.sessions_max
        self._leases.limbo_bytes_max = int(arena_bytes * limits.limbo_fraction)
        self._acquisition.leasable_bytes = int(arena_bytes * limits.leased_fraction)
        self._file_leases.nbytes_max = int(
            self._write_behind.capacity_bytes * limits.leased_fraction
        )
        self.hints.pinned_bytes_max = int(arena_bytes * limits.pinned_fraction)
        self._planner.pins.shrink(self.hints.pinned_bytes_max)
        self.hints.pin_ttl_max_s = limits.pin_ttl_max_s

    async def start(self) -> None:
        """Open the tiers and index what they hold."""
        await self.arena.start()
        await self._write_behind.start()
        self._publish()
        self._keep("house", self._keep_house)
        self._keep("cap", self._keep_cap)
        self._keep("holes", self._holes.run)
        if self._objects is not None:
            self._objects.start(self)
        if self._scrub is not None:
            self._keep("scrub", self._scrub.run)

    def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        task = keep_running(name, work, self._metrics.task_failed)
        self._tasks.append(asyncio.create_task(task))

    async def close(self, drain_s: float = 10.0) -> None:
        """Flush for at most `drain_s` and close the tiers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.hints.close()
        if self._objects is not None:
            await self._write_behind.flush(self._now() + drain_s)
            await self._objects.close(drain_s)
        self._leases.let_go_of_frames()
        await self._write_behind.close(drain_s)
        await self.arena.close()

    # ---- sessions ----------------------------------------------------------------------------

    def register(self, namespace: Namespace) -> NamespaceId:
        """Learn a namespace; of too many, one is forgotten: see `Namespaces`.

        Raises InvalidRequest if its records cannot fit into the arena.
        """
        largest = max(group.record_nbytes for group in namespace.groups)
        if largest > self.arena.record_nbytes_max:
            raise InvalidRequest(
                f"records of {largest} bytes do not fit: the daemon's dram.extent is "
                f"{self.arena.record_nbytes_max} bytes"
            )
        writable = self._write_behind.record_nbytes_max
        if writable is not None and padded(largest) > writable:
            raise InvalidRequest(
                f"records of {largest} bytes do not fit into a frame of at most {writable} bytes: "
                "raise the daemon's file.segment"
            )
        known = self._planner.index.namespaces
        if known.spec(namespace.id) is None:
            known.make_room(namespace, lambda each: any(self._leases.reservations(each)))
        return self._planner.index.register(namespace)

    def _learn(self, namespace: Namespace) -> None:
        """Take what an earlier life knew; one that does not fit any more is nobody's."""
        with contextlib.suppress(KVStoreError):
            self.register(namespace)

    def namespace(self, namespace_id: NamespaceId) -> Namespace:
        """Return a registered namespace. Raises UnknownNamespace."""
        return self._planner.namespace(namespace_id)

    def in_use(self, namespace_id: NamespaceId) -> AbstractContextManager[None]:
        """Let a namespace not be forgotten during a call in it. Raises UnknownNamespace."""
        return self._planner.index.namespaces.in_use(namespace_id)

    def namespaces(self) -> list[NamespaceUse]:
        """Return what there is of each namespace, by id. Of what was found on disk and is not
        indexed yet, nothing is counted."""
        found = self._write_behind.found_namespaces if self._write_behind.unrecalled_runs else ()
        uses = {each: NamespaceUse(each, None, 0, UNKNOWN_MODEL) for each in found}
        uses |= {each.id: each.use for each in self._planner.index.namespaces}
        return sorted(uses.values())

    def open_session(self, token: str, client: str) -> SessionId:
        """Return the session of `token`, a new one if none is alive."""
        return self._leases.open(token, client)

    def join(self, session: SessionId, token: str, process: int = 0) -> Member:
        """Add a process to a session; `leave` when its socket closes. Raises SessionEnded.

        process: its id, 0 if this host cannot see it.
        """
        return Member(session, self._leases.join(session, token, process))

    def processes(self, session: SessionId) -> Collection[int]:
        """Return the process ids of a session's members, none if there is no such session."""
        return self._leases.processes(session)

    def session_number(self, session: SessionId) -> int:
        """Return what others may know a session by: it entitles to nothing. 0: there is none."""
        found = self._leases.find(session)
        return found.number if found is not None else 0

    def leave(self, member: Member) -> None:
        """Note that a process is gone: its session ends."""
        session = self._leases.find(member.session)
        self._leases.leave(member.session, member.id)
        self._room.set()
        logger.info("session=%r state=ended", session.name if session is not None else "")

    # ---- get ---------------------------------------------------------------------------------

    def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        skip_blocks: int = 0,
        recompute_s_per_block: float = 0.0,
    ) -> Match:
        """Return how long the prefix would hit now, and how much is worth loading. Pins nothing."""
        _check_skip(keys, skip_blocks)
        self._write_behind.recall(keys)
        match = self._planner.match(namespace_id, keys, skip_blocks)
        if match.resident_blocks == match.hit_blocks:
            return match
        spans = needed_spans(self._planner.namespace(namespace_id), match.hit_blocks, skip_blocks)
        found = self._planner.find(namespace_id, keys, spans)
        nbytes = sum(r.nbytes for r in found if r is not None and r.resident is None)
        pace = self._promotion.pace
        saved = match.hit_blocks - max(skip_blocks, match.resident_blocks)
        if recompute_s_per_block and pace.loses(nbytes, saved * recompute_s_per_block):
            return replace(match, worth_blocks=match.resident_blocks)
        return replace(match, load_s=pace.predict(nbytes) or 0.0)

    async def acquire(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        readers: int = 1,
        wait_s: float = 0.0,
        spans: tuple[Span, ...] | None = None,
        request_id: str = "",
        recompute_s_per_block: float = 0.0,
        session_id: str = "",
        in_files: bool = False,
    ) -> Grant:
        """Bring the longest stored prefix up and lease it; with `spans`, exactly those parts.

        Bytes in slower tiers have `wait_s` to come up, or as long as that is faster than computing
        them, if told what that takes; past it the answer is a shorter prefix. Over the bound on
        leased bytes the answer is an estimate without slots (`leased` is false); with `spans`,
        parts beyond it have no slot, as if they were missing. How the prefix of `request_id` was
        answered is remembered: see `outcomes`. session_id: of the conversation, for hints.
        in_files: what lies in files as it was put, and not in the arena, stays there, and its place
        is leased, as far as leases may hold the file tier; else it comes up like everything.
        """
        client = self._leases.check(session).client
        _check_skip(keys, skip_blocks)
        with self.in_use(namespace_id):
            await self._recall(keys)
            began = self._now()
            deadline = began + min(wait_s, self.limits.wait_max_s)
            ask = Ask(
                session,
                client,
                request_id,
                namespace_id,
                keys,
                skip_blocks,
                began,
                recompute_s_per_block,
                session_id,
                in_files,
            )
            if spans is None:
                return await self._lease_prefix(ask, readers, deadline)
            self._check_spans(namespace_id, keys, spans)
            return await self._lease_parts(ask, spans, readers, deadline)

    async def _lease_parts(
        self, ask: Ask, spans: tuple[Span, ...], readers: int, deadline: float
    ) -> Grant:
        if not self._lends(ask, spans):
            ask = replace(ask, in_files=False)
        absent, _ = await self._promotion.promote(
            ask.namespace_id, ask.keys, spans, deadline, in_files=ask.in_files
        )
        grant = self._grant(ask, spans, readers, hit_blocks=0)
        lent = sum(place is not None for place in grant.places)
        found = lent + sum(slot is not None for slot in grant.slots)
        file = min(absent + lent, found)
        self._answers.count(ask, asked=len(grant.slots), dram=found - file, file=file)
        return grant

    async def _lease_prefix(self, ask: Ask, readers: int, deadline: float) -> Grant:
        namespace = self._planner.namespace(ask.namespace_id)
        skip = ask.skip_blocks
        hit, why, resident, affordable, fetched = await self._acquisition.promote(ask, deadline)
        spans = needed_spans(namespace, hit, skip)
        if ask.in_files and not self._lends(ask, spans):
            return await self._lease_prefix(replace(ask, in_files=False), readers, deadline)
        # Others may have been granted theirs while this one waited for its bytes.
        if hit > skip and self._acquisition.slots_nbytes(ask, spans) > self._acquisition.room_bytes:
            affordable = False
        if not affordable:
            self._answers.note(ask, hit, Reason.LEASED_BYTES)
            return Grant(0, 0.0, (), (), hit_blocks=hit, leased=False)
        file = max(0, hit - max(skip, resident)) - fetched
        dram = hit - skip - file - fetched
        asked = len(ask.keys) - skip
        self._answers.count(ask, asked=asked, dram=dram, file=file, objects=fetched)
        grant = self._grant(ask, spans, readers, hit_blocks=hit)
        self._answers.note(ask, hit, why, grant.lease_id, file=file, objects=fetched)
        return grant

    def release(self, session: SessionId, lease_ids: Sequence[int]) -> list[bool]:
        """End leases, or abandon reservations. True: the slots were the caller's until now."""
        held = [self._leases.release(session, lease_id) for lease_id in lease_ids]
        for lease_id, safe in zip(lease_ids, held, strict=True):
            self._answers.released(session, lease_id, held=safe)
        self._room.set()
        return held

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes, for whoever holds a lease on it."""
        return self.arena.view(slot)

    def _grant(self, ask: Ask, spans: tuple[Span, ...], readers: int, *, hit_blocks: int) -> Grant:
        records = self._planner.find(ask.namespace_id, ask.keys, spans)
        held = _within(self._acquisition.room_bytes, [r.resident if r else None for r in records])
        lent = self._file_leases.places(records, held) if ask.in_files else NOTHING_LENT
        lease = self._leases.grant(ask.session, held, readers=max(1, readers), frames=lent.frames)
        self._metrics.bytes.labels("dram", "read").inc(lease.nbytes)
        self._metrics.bytes.labels("file", "lent").inc(lent.nbytes)
        self._planner.touch(ask.keys)
        self.hints.asked(ask.session_id, ask.namespace_id, ask.keys)
        return Grant(
            lease_id=lease.id,
            deadline_s=self.limits.lease_s,
            spans=spans,
            slots=tuple(slot.slot if slot else None for slot in held),
            checksums=tuple(record.checksum if record else 0 for record in records),
            hit_blocks=hit_blocks,
            places=lent.places,
        )

    def _lends(self, ask: Ask, spans: Sequence[Span]) -> bool:
        """Say whether what the asker would read in files may be lent now, all of it."""
        records = self._planner.find(ask.namespace_id, ask.keys, spans)
        return ask.in_files and self._file_leases.has_room(records)

    # ---- why a hit is what it is -----------------------------------------------------------------

    def outcomes(self, request_id: str, limit: int) -> list[Outcome]:
        """Return how the last requests were answered whose id starts so, newest first."""
        return self._answers.outcomes(request_id, limit)

    def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        """Return where each block of a prefix is now, and what would end its hit."""
        check_keys(keys)
        self._write_behind.recall(keys)
        return self._answers.explain(namespace_id, keys)

    # ---- put ---------------------------------------------------------------------------------

    async def reserve(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        first_block: int,
        parent: BlockKey | None,
        spans: tuple[Span, ...],
        wait_s: float = 0.0,
        session_id: str = "",
    ) -> Grant:
        """Lease empty slots for the records of `spans` that are not stored yet.

        keys are consecutive blocks of one prefix, the first of them block `first_block`, after
        `parent`. Without room it waits up to `wait_s`; what then has no slot is `refused`.
        session_id: of the conversation they belong to, for hints.
        """
        self._leases.check(session)
        self._check_spans(namespace_id, keys, spans)
        check_keys(keys)
        if first_block + len(keys) - 1 > BLOCK_INDEX_MAX:
            raise InvalidRequest(f"block {first_block} and {len(keys)} more: beyond 2**32 blocks")
        deadline = self._now() + min(wait_s, self.limits.wait_max_s)
        with self.in_use(namespace_id):
            await self._recall(keys)
            held, refused = await self._find_room(
                session, namespace_id, keys, spans, parent=parent, deadline=deadline
            )
            write = Reservation(
                namespace_id, tuple(keys), first_block, parent, spans, refused, session_id
            )
            try:
                await asyncio.sleep(0)
                lease = self._leases.grant(session, held, write=write)
                self.hints.reserved(write)
            except BaseException:  # the session ended between two steps, or nobody waits any more
                self._free(held)
                raise
        return Grant(
            lease_id=lease.id,
            deadline_s=self.limits.lease_s,
            spans=spans,
            slots=tuple(slot.slot if slot else None for slot in held),
            refused=refused,
        )

    async def _find_room(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: tuple[Span, ...],
        *,
        parent: BlockKey | None,
        deadline: float,
    ) -> tuple[Sequence[HeldSlot | None], int]:
        """Return slots, and how many records are refused when the time is over."""
        while True:
            behind = self._planner.dirty.nbytes > self.limits.write_behind_bytes_max
            self._planner.eviction.write_ahead(self._nbytes_of(namespace_id, spans))
            placement = await _in_steps(self._planner.puts.place(namespace_id, keys, spans, parent))
            if self._planner.dirty.count:  # what has to be written before it may leave
                self._write_behind.wake()
            short = placement.refused > 0 or behind
            if not short or self._now() >= deadline:
                break
            self._free(placement.held)
            await self._wait_for_room(deadline)
            self._leases.check(session)
        held, refused = placement.held, placement.refused
        if behind:
            self._free(held)
            refused += sum(slot is not None for slot in held)
            held = tuple(None for _ in held)
        if any(held):
            self._refuses_since = None
        elif refused and self._refuses_since is None:
            self._refuses_since = self._now()
        if refused:
            self._metrics.refusals.labels("write_behind" if behind else "no_room").inc(refused)
        return held, refused

    def _nbytes_of(self, namespace_id: NamespaceId, spans: Sequence[Span]) -> int:
        return span_nbytes(self._planner.namespace(namespace_id), spans)

    async def commit(
        self,
        session: SessionId,
        lease_id: int,
        checksums: Sequence[int],
        *,
        durable: bool = False,
        wait_s: float = 30.0,
    ) -> Committed:
        """Publish what was written into a reservation; `durable` waits for an fdatasync."""
        lease = self._leases.reservation(session, lease_id)
        if lease is None or lease.write is None:
            raise InvalidRequest(
                f"no reservation {lease_id} to commit: never reserved, committed before, or expired"
            )
        if len(checksums) != len(lease.held):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(lease.held)} slots")
        write = lease.write
        # The session may end between two steps; what is published must not be freed by that.
        try:
            with (
                self.in_use(write.namespace_id),
                self._planner.pinned([slot for slot in lease.held if slot is not None]),
            ):
                new, existing = await _in_steps(
                    self._planner.puts.commit(write, lease.held, checksums, durable=durable)
                )
                self.hints.committed(write)
            self._write_behind.wake()
            await asyncio.sleep(0)
        finally:
            self._leases.release(session, lease_id)
        self._metrics.bytes.labels("dram", "write").inc(lease.nbytes)
        unwritten = sum(slot is None for slot in lease.held) - write.refused
        safe = False
        if durable:
            records = self._planner.find(write.namespace_id, write.keys, write.spans)
            # What was stored already may have left since `reserve` passed it over.
            gone = records.count(None) > write.refused
            safe = not gone and await self._durable([r for r in records if r is not None], wait_s)
        return Committed(new, existing + unwritten, write.refused, safe)

    async def flush(self, wait_s: float) -> bool:
        """Wait until everything committed so far is durable. False: the time ran out, writes
        failed, or there is no file tier."""
        return await self._write_behind.flush(self._now() + min(wait_s, self.limits.wait_max_s))

    async def _durable(self, records: Sequence[StoredPart], wait_s: float) -> bool:
        deadline = self._now() + min(wait_s, self.limits.wait_max_s)
        last = max((record.dirty for record in records), default=0)
        await self._write_behind.settle(last, deadline)
        return all(record.frame is not None for record in records)

    async def _wait_for_room(self, deadline: float) -> None:
        self._room.clear()
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._room.wait()),
            self._write_behind.progress(),
        ]
        self._waiting_for_room += 1
        try:
            _, pending = await asyncio.wait(
                waits,
                timeout=max(0.0, min(deadline - self._now(), HOUSEKEEPING_S)),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._waiting_for_room -= 1
        for wait in pending:
            wait.cancel()

    # ---- delete, look around -------------------------------------------------------------------

    async def drop_wrong(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Verify this node's copies of blocks that a reader reports as corrupt; drop wrong ones.

        Returns of how many blocks something was wrong. What the bucket has is verified whenever it
        is fetched. Raises Unavailable over the bound on what reports may cost.
        """
        check_keys(keys)
        await self._recall(keys)
        index = self._planner.index
        try:
            return await self._verifier.drop_wrong(
                [index.get(namespace_id, key) for key in dict.fromkeys(keys)]
            )
        finally:
            self._room.set()

    async def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Delete blocks for good: when this returns, not even a power cut brings them back."""
        check_keys(keys)
        await self._recall(keys)
        if not any(self._planner.index.get(namespace_id, key) for key in keys):
            self._planner.namespace(namespace_id)  # after a restart, blocks are known before it is
        deletion = self._planner.delete(namespace_id, keys)
        # Keys the index does not know are buried too: an evicted frame may still be on disk.
        try:
            await self._bury([namespace_id], keys)
        finally:
            self._room.set()
        return deletion.deleted

    async def clear(self, namespace_id: NamespaceId | None) -> int:
        """Delete every block of a namespace, or of all, for good.

        Raises Unavailable, after it has deleted what it can, if the bucket may keep some. "All" are
        those of this node, and those in the bucket when this node counted it last.
        """
        uncounted: Unavailable | None = None
        if namespace_id is None and self._objects is not None:
            try:
                await self._objects.counted()
            except Unavailable as error:
                uncounted = error
        deletion = self._planner.clear(namespace_id)
        namespaces = {namespace_id} if namespace_id is not None else set()
        if namespace_id is None:
            known = {each.id for each in self._planner.index.namespaces}
            namespaces = deletion.namespaces | known | self._write_behind.found_namespaces
            if self._objects is not None:
                namespaces |= self._objects.found_namespaces
        try:
            await self._bury(namespaces, None)
        finally:
            self._room.set()
        if uncounted is not None:
            raise uncounted
        return deletion.deleted

    async def _recall(self, keys: Sequence[BlockKey]) -> None:
        """Index what was found on disk of these blocks, letting others run between its steps."""
        for start in range(0, len(keys), RECALL_STEP_KEYS):
            if not self._write_behind.unrecalled_runs:
                return
            self._write_behind.recall(keys[start : start + RECALL_STEP_KEYS])
            await asyncio.sleep(0)

    async def recalled(self, wait_s: float) -> None:
        """Wait until all that was found on disk is indexed. Raises Unavailable after `wait_s`."""
        if not await self._write_behind.recalled(self._now() + min(wait_s, self.limits.wait_max_s)):
            raise Unavailable(
                f"{self._write_behind.unrecalled_runs} runs found on disk are not indexed yet: try "
                "again in a while"
            )

    async def _bury(
        self, namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
    ) -> None:
        """Make a delete durable, here and in the bucket. Call it in one step with the planner's."""
        if self._objects is None:
            await self._write_behind.bury(namespaces, keys)
            return
        with self._objects.deleting(namespaces, keys):
            try:
                await self._write_behind.bury(namespaces, keys)
            finally:  # a disk that is out of use keeps no other copy alive
                await self._objects.delete(namespaces, keys)

    def scan(
        self, namespace_id: NamespaceId | None, after: BlockKey | None, limit: int
    ) -> list[ScanItem]:
        """Return up to `limit` blocks in key order, those behind `after`. What was found on disk
        and is not indexed yet is left out: see `recalled`."""
        index = self._planner.index
        found = index if namespace_id is None else index.blocks_in(namespace_id)
        blocks = (block for block in found if after is None or block.key > after)
        return [
            ScanItem(
                key=block.key,
                namespace_id=block.namespace_id,
                block_index=block.block_index,
                nbytes=block.nbytes,
                resident=block.resident_parts == len(block.records),
                durable=block.framed_parts == len(block.records),
            )
            for block in heapq.nsmallest(limit, blocks, key=lambda block: block.key)
        ]

    def trouble(self) -> str:
        """Return why a router should ask another node, "" if it should not."""
        recalling_s = self._write_behind.recalling_s
        if recalling_s > RECALL_S_MAX:
            return (
                f"recovering: {self._write_behind.unrecalled_runs} runs found on disk are not "
                f"indexed after {recalling_s:.0f} s"
            )
        since = self._refuses_since
        if since is None or self._now() - since < REFUSES_S:
            return ""
        why = self._takes_no_writes()
        return f"no tier takes writes: {why}" if why else ""

    def _takes_no_writes(self) -> str:
        """Return what keeps puts from being stored, "" if nothing does now."""
        dirty, dirty_max = self._planner.dirty.nbytes, self.limits.write_behind_bytes_max
        if dirty > dirty_max:
            return f"{dirty} bytes wait for the file tier, limits.write_behind_max is {dirty_max}"
        held = self._leases.leased_bytes + self._planner.pins.nbytes
        capacity = self.arena.capacity_bytes
        if held > FULL_FRACTION * capacity:
            return f"leases and pins hold {held} of the {capacity} bytes of the arena"
        return ""

    def stats(self) -> dict[str, Any]:
        """Return what the node holds and owes, as plain numbers. Bytes, seconds, counts."""
        now = snapshot(
            planner=self._planner,
            leases=self._leases,
            arena=self.arena,
            write_behind=self._write_behind,
            limits=self.limits,
        )
        queues = {
            "promote": self._write_behind.reads.under_way,
            "write_behind": self._planner.dirty.count,
            "room": self._waiting_for_room,
            "recall": self._write_behind.unrecalled_runs,
        }
        objects = {"object": self._objects.stats()} if self._objects is not None else {}
        return {"uptime_s": self._now() - self._started, "queues": queues, **now, **objects}

    # ---- inside --------------------------------------------------------------------------------

    def _check_spans(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> None:
        namespace = self._planner.namespace(namespace_id)
        if len(spans) > SPANS_MAX or len({span.part for span in spans}) != len(spans):
            raise InvalidRequest("spans name a part twice, or there are too many of them")
        for part, begin, end in spans:
            namespace.record_nbytes(part)
            if not 0 <= begin <= end <= len(keys):
                raise InvalidRequest(f"span {begin}:{end} of {len(keys)} keys")
        records = sum(end - begin for _, begin, end in spans)
        if records > RECORDS_MAX:
            raise InvalidRequest(f"{records} records in one call; the limit is {RECORDS_MAX}")

    def _free(self, held: Sequence[HeldSlot | None]) -> None:
        for slot in held:
            if slot is not None:
                self._planner.unpin(slot)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            expired = self._leases.expire()
            if expired:
                self._metrics.expired_leases.inc(expired)
                logger.warning(
                    "leases_expired=%d limbo_bytes=%d", expired, self._leases.limbo_bytes
                )
            self.hints.tick()
            self._planner.eviction.write_ahead(self.arena.capacity_bytes // DEMOTED_AHEAD)
            if self._planner.dirty.count:
                self._write_behind.wake()
            await self.arena.renew()
            self._set_bounds()
            self._publish()

    def _publish(self) -> None:
        self._metrics.publish(self.stats(), self._planner.counts.left)


async def _in_steps(steps: Steps[T]) -> T:
    """Carry out a decision of the planner, letting others run between its steps."""
    with contextlib.closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as done:
                decision: T = done.value
                return decision
            await asyncio.sleep(0)


def _within(nbytes: int, slots: Sequence[HeldSlot | None]) -> list[HeldSlot | None]:
    """Return the slots, from the first on, that fit into `nbytes`; None in place of the others."""
    fitting: list[HeldSlot | None] = []
    for held in slots:
        if held is not None:
            nbytes -= padded(held.nbytes)
        fitting.append(held if nbytes >= 0 else None)
    return fitting


def _check_skip(keys: Sequence[BlockKey], skip_blocks: int) -> None:
    check_keys(keys)
    if not 0 <= skip_blocks <= len(keys):
        raise InvalidRequest(f"skip_blocks={skip_blocks} of {len(keys)} keys")
