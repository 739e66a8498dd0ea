"""Bringing records up into the arena, for those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from kvstore.block import BlockKey, NamespaceId, Span
from kvstore.mover import Mover
from kvstore.obs import Metrics
from kvstore.pace import Pace, Race, Stakes
from kvstore.planner import Planner

PROMOTE_ROUNDS_MAX = 3


class Brought(NamedTuple):
    """How a promotion went. absent: records that were stored, but not in the arena at first.
    slower: it was not begun, or not waited for, because recomputing is faster."""

    absent: int
    slower: bool = False


class Promotion:
    """Plans reads and waits for them; several may wait for one read."""

    def __init__(
        self, planner: Planner, mover: Mover, metrics: Metrics, now: Callable[[], float]
    ) -> None:
        self.pace = Pace(now)
        self._planner = planner
        self._mover = mover
        self._metrics = metrics
        self._now = now

    async def bring_up(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        deadline: float,
        stakes: Stakes | None = None,
    ) -> Brought:
        """Bring `spans` into the arena, as far as that goes until the deadline.

        stakes: what recomputing would take; None: nobody would, or nobody knows.
        """
        absent = 0
        for attempt in range(PROMOTE_ROUNDS_MAX):
            records = [r for r in self._planner.find(namespace_id, keys, spans) if r is not None]
            missing = [record for record in records if record.resident is None]
            absent = absent if attempt else len(missing)
            if not missing:
                break
            nbytes = sum(record.nbytes for record in missing)
            race = self._race(nbytes, stakes)
            if stakes is not None and race is None:
                return Brought(absent, slower=True)
            # What is up already must not make room for what comes up.
            with self._planner.pinned([r.resident for r in records if r.resident is not None]):
                began = self._now()
                with closing(self._planner.plan_reads(namespace_id, keys, spans)) as plan:
                    for read in plan:
                        self._mover.start_read(read)
                        await asyncio.sleep(0)  # it goes to the disk now; others' turn, too
                reads = self._mover.reads_of(missing)
                late = await self._arrival(reads, deadline, race)
            if late:
                slower = race is not None and self._now() < deadline
                if slower:
                    self._give_up(late, nbytes, began)
                return Brought(absent, slower)
            if not reads:
                break  # there is no room for them
            if all(record.resident for record in missing):  # else some could not be read
                self._learn(nbytes, self._now() - began, race)
        return Brought(absent)

    async def _arrival(
        self, reads: set[asyncio.Task[None]], deadline: float, race: Race | None
    ) -> set[asyncio.Task[None]]:
        """Wait for reads as long as that is worth it; return those that have not ended."""
        pending = reads
        when = asyncio.ALL_COMPLETED if race is None else asyncio.FIRST_COMPLETED
        while pending:
            share = 1 - len(pending) / len(reads)
            until = deadline if race is None else min(deadline, race.until(share))
            timeout_s = until - self._now()
            if timeout_s <= 0:
                break
            _, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=when)
        return pending

    def _give_up(self, late: set[asyncio.Task[None]], nbytes: int, began: float) -> None:
        """Wait for reads no more, but see them through: until they end, the tier is slow."""
        left = set(late)

        def ended(read: asyncio.Task[None]) -> None:
            left.discard(read)
            if not left:
                self.pace.caught_up()
                self.pace.note(nbytes, self._now() - began)

        self._metrics.load_decisions.labels("cut").inc()
        self.pace.fell_behind()
        for read in late:
            read.add_done_callback(ended)

    def _race(self, nbytes: int, stakes: Stakes | None) -> Race | None:
        race = self.pace.race(nbytes, stakes) if stakes is not None else None
        if stakes is not None:
            decision = "refuse" if race is None else "load" if race.predicted_s else "explore"
            self._metrics.load_decisions.labels(decision).inc()
        return race

    def _learn(self, nbytes: int, took_s: float, race: Race | None) -> None:
        self.pace.note(nbytes, took_s)
        if race is not None and race.predicted_s is not None:
            self._metrics.load_predicted_seconds.observe(race.predicted_s)
            self._metrics.load_seconds.observe(took_s)
