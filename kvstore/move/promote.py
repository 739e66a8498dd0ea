"""Bringing records up into the arena, for those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

from kvstore.decide.index import StoredBlock, StoredPart
from kvstore.decide.pace import Stakes
from kvstore.decide.planner import Planner, Read, frames_of, is_readable
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId, Span, padded
from kvstore.move.file_reads import Reads
from kvstore.move.load_race import Ended, LoadRaces

PROMOTE_ROUNDS_MAX = 3
HEAD_START_NBYTES = 64 << 20  # of a smaller load, a moment is too large a part
HEAD_START_S = 0.005  # a device that takes longer for one block is not waited for
STEP_NBYTES = 1 << 20  # of small reads, begun in one step: they share a thread


class Promoted(NamedTuple):
    """How a promotion went. absent: records that were stored, but not in the arena at first.
    slower: it was not begun, or not waited for, because recomputing is faster."""

    absent: int
    slower: bool = False


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

    async def promote(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        deadline: float,
        stakes: Stakes | None = None,
        *,
        in_files: bool = False,
    ) -> Promoted:
        """Bring `spans` into the arena, as far as that goes until the deadline.

        stakes: what recomputing would take; None: nobody would, or nobody knows.
        in_files: what the asker can read in files by itself stays there.
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
            race = None
            if stakes is not None:
                whole = self._planner.namespace(namespace_id).has_windows
                race = self._loads.race(nbytes, stakes, whole=whole)
            if stakes is not None and race is None:
                return Promoted(absent, slower=True)
            # What is resident already must not be evicted for what is promoted.
            with (
                self._planner.pinned([r.resident for r in records if r.resident is not None]),
                self._planner.pinned_frames(lent),
            ):
                began = self._now()
                if not self._reads.brings(missing):
                    async with self._turn:  # else the reads of two loads mix, and both are late
                        alone = nbytes >= HEAD_START_NBYTES and not self._reads.under_way
                        reads_planned = self._planner.reads.plan(
                            namespace_id, keys, spans, first_alone=alone, in_files=in_files
                        )
                        with closing(reads_planned) as plan:
                            await self._start(plan, first_alone=alone)
                reads = self._reads.of(missing)
                if not reads:
                    break  # there is no room for them
                ended = await self._loads.wait(
                    dict.fromkeys(reads, 1),
                    nbytes,
                    began=began,
                    deadline=deadline,
                    race=race,
                    arrived=lambda: all(record.resident for record in missing),  # noqa: B023
                )
            if ended is not Ended.DONE:
                return Promoted(absent, slower=ended is Ended.CUT)
        return Promoted(absent)

    async def _start(self, plan: Iterable[Read], *, first_alone: bool) -> None:
        """Start reads as they are planned.

        first_alone: the first block has the disk to itself for a moment. Among the reads behind it,
        it would take several times as long; alone, it costs them next to nothing.
        """
        first: StoredBlock | None = None
        head: list[StoredPart] = []
        begun_nbytes = 0
        for read in plan:
            first = first or read.blocks[0]
            try:
                if first_alone and read.blocks[0] is not first:
                    first_alone = False
                    await self._head_start(head)
            finally:
                self._reads.start(read)  # cancelled or not: it has its slots
            if first_alone:
                head += read.stored
            begun_nbytes += sum(padded(record.nbytes) for record in read.stored)
            if begun_nbytes >= STEP_NBYTES:
                begun_nbytes = 0
                await asyncio.sleep(0)  # they go to the disk now; others' turn, too

    async def _head_start(self, head: Sequence[StoredPart]) -> None:
        if reads := self._reads.of(head):
            await asyncio.wait(reads, timeout=HEAD_START_S)
        await asyncio.sleep(0)  # whoever waits for it goes first
