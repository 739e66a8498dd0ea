"""Bringing records up into the arena, for those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from kvstore.decide.index import StoredBlock, StoredPart
from kvstore.decide.pace import Race, Stakes
from kvstore.decide.planner import Planner, Read, frames_of, is_readable
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId, Span, padded
from kvstore.move.file_reads import Reads
from kvstore.move.filling import Coming, Filling
from kvstore.move.load_race import Ended, LoadRaces

PROMOTE_ROUNDS_MAX = 3
HEAD_START_NBYTES = 64 << 20  # of a smaller load, a moment is too large a part
HEAD_START_S = 0.005  # a device that takes longer for one block is not waited for
STEP_NBYTES = 1 << 20  # of reads, planned in one step
WINDOW_READS, WINDOW_S = 64, 0.005  # planned, at most, before the first of them begins
EARLY_NBYTES_MIN = 8 << 20  # of a smaller load there is little to copy before its end
EARLY_S = 0.1  # at most so long before its expected end: meanwhile the asker's own memory waits


class Promoted(NamedTuple):
    """How a promotion went. absent: records that were stored, but not in the arena at first.
    slower: it was not begun, or not waited for, because recomputing is faster. filling: the last
    bytes are on their way to their slots; lease these before anybody else has a turn."""

    absent: int
    slower: bool = False
    filling: Filling | None = None


class Promotion:
    """Plans reads and waits for them; several may wait for one read."""

    def __init__(
        self, planner: Planner, reads: Reads, metrics: Metrics, now: Callable[[], float]
    ) -> None:
        self._loads = LoadRaces(metrics, now)
        self.pace = self._loads.pace
        self._planner = planner
        self._reads = reads
        self._now = now
        self._turn = asyncio.Lock()
        self._filling: set[asyncio.Task[Ended]] = set()

    async def promote(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        deadline: float,
        stakes: Stakes | None = None,
        *,
        in_files: bool = False,
        early_blocks: int = 0,
    ) -> Promoted:
        """Bring `spans` into the arena, as far as that goes until the deadline.

        stakes: what recomputing would take; None: nobody knows. in_files: what the asker can read
        itself stays there. early_blocks: of the hit, if the asker takes a `Filling`; 0: it waits.
        """
        absent = 0
        for attempt in range(PROMOTE_ROUNDS_MAX):
            records = [r for r in self._planner.find(namespace_id, keys, spans) if r is not None]
            missing = [record for record in records if record.resident is None]
            lent = frames_of(missing) if in_files else ()
            if in_files:
                missing = [record for record in missing if not is_readable(record)]
            absent = absent if attempt else len(missing)
            if not missing:
                break
            nbytes = sum(record.nbytes for record in missing)
            race = self._race(namespace_id, nbytes, stakes)
            if stakes is not None and race is None:
                return Promoted(absent, slower=True)
            # What is resident already must not be evicted for what is promoted.
            with (
                self._planner.pinned([r.resident for r in records if r.resident is not None]),
                self._planner.pinned_frames(lent),
            ):
                began = self._now()
                if not self._reads.brings(missing):
                    await self._begin(namespace_id, keys, spans, nbytes, in_files=in_files)
                reads = self._reads.of(missing)
                if not reads:
                    break  # there is no room for them
                load = self._loads.wait(
                    dict.fromkeys(reads, 1),
                    nbytes,
                    began=began,
                    deadline=deadline,
                    race=race,
                    arrived=lambda: all(record.resident for record in missing),  # noqa: B023
                )
                expected_s = self._expected_s(nbytes) if early_blocks else None
                if expected_s is not None:
                    task = await self._watched(load, began + expected_s - EARLY_S)
                    coming = _coming(self._planner.find(namespace_id, keys, spans), spans)
                    if coming and not task.done():
                        filling = Filling(coming, early_blocks, self._reads, task)
                        return Promoted(absent, filling=filling)
                ended = await (task if expected_s is not None else load)
            if ended is not Ended.DONE:
                return Promoted(absent, slower=ended is Ended.CUT)
        return Promoted(absent)

    def _race(self, namespace_id: NamespaceId, nbytes: int, stakes: Stakes | None) -> Race | None:
        if stakes is None:
            return None
        whole = self._planner.namespace(namespace_id).has_windows
        return self._loads.race(nbytes, stakes, whole=whole)

    async def _begin(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        nbytes: int,
        *,
        in_files: bool,
    ) -> None:
        """Plan and start the reads of a load, in its turn."""
        async with self._turn:  # else the reads of two loads mix, and both are late
            alone = nbytes >= HEAD_START_NBYTES and not self._reads.under_way
            reads = self._planner.reads.plan(
                namespace_id,
                keys,
                spans,
                nbytes=nbytes,
                first_alone=alone,
                in_files=in_files,
            )
            with closing(reads) as plan:
                await self._start(plan, first_alone=alone)

    def _expected_s(self, nbytes: int) -> float | None:
        """Return how long a load is expected to take that is worth answering early; None: nobody
        knows, or it is small."""
        return self.pace.predict(nbytes) if nbytes >= EARLY_NBYTES_MIN else None

    async def _watched(self, load: Coroutine[Any, Any, Ended], until: float) -> asyncio.Task[Ended]:
        """Wait for a load, but not past `until`. The task goes on even if nobody waits for it any
        more: its end tells the pace of the tier."""
        task = asyncio.create_task(load)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)
        await asyncio.wait({task}, timeout=max(0.0, until - self._now()))
        return task

    def close(self) -> None:
        """Wait for no load any more."""
        for task in self._filling:
            task.cancel()

    async def _start(self, plan: Iterable[Read], *, first_alone: bool) -> None:
        """Start reads, a window of them as soon as it is planned.

        Not each by itself: threads that have begun to read take the interpreter's lock from the
        plan, which may have to evict for every slot, again and again.
        first_alone: the first block has the disk to itself for a moment. Among the reads behind it,
        it would take several times as long; alone, it costs them next to nothing.
        """
        first: StoredBlock | None = None
        window: list[Read] = []
        nbytes = 0  # since others had a turn
        until = self._now() + WINDOW_S
        try:
            for read in plan:
                first = first or read.blocks[0]
                head: list[StoredPart] = []
                if first_alone and read.blocks[0] is not first:
                    first_alone = False
                    head = [record for each in window for record in each.stored]
                    self._start_all(window)
                window.append(read)
                if head:
                    await self._head_start(head)
                    until = self._now() + WINDOW_S
                nbytes += sum(padded(record.nbytes) for record in read.stored)
                if nbytes >= STEP_NBYTES:
                    nbytes = 0
                    if len(window) >= WINDOW_READS or self._now() >= until:
                        self._start_all(window)
                        until = self._now() + WINDOW_S
                    await asyncio.sleep(0)  # others' turn; reads that were started go to the disk
        finally:
            self._start_all(window)  # cancelled or not: they have their slots

    def _start_all(self, window: list[Read]) -> None:
        for read in window:
            self._reads.start(read)
        window.clear()

    async def _head_start(self, head: Sequence[StoredPart]) -> None:
        if reads := self._reads.of(head):
            await asyncio.wait(reads, timeout=HEAD_START_S)
        await asyncio.sleep(0)  # whoever waits for it goes first


def _coming(records: Sequence[StoredPart | None], spans: Sequence[Span]) -> list[Coming] | None:
    """Return the records that are on their way, in prefix order; None if others are missing.

    records: over the spans in order.
    """
    blocks = [block for _, begin, end in spans for block in range(begin, end)]
    coming = []
    for block, record in zip(blocks, records, strict=True):
        if record is None or (record.resident is None and record.loading is None):
            return None
        if record.resident is None and record.loading is not None:
            coming.append(Coming(block, record, record.loading))
    return sorted(coming, key=lambda each: each.block)
