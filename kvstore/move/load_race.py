"""Loads from one slower tier: raced against recomputing, waited for, and learnt from."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from kvstore.decide.pace import Pace, Race, Stakes
from kvstore.metrics import Metrics


class Ended(Enum):
    """How a load went, for the one who asked."""

    DONE = "done"
    LATE = "late"  # the deadline came first
    CUT = "cut"  # recomputing is faster by now


class LoadRaces:
    """The loads of one tier. late_at: when one last ended late, -inf for never."""

    def __init__(self, metrics: Metrics, now: Callable[[], float]) -> None:
        self.pace = Pace(now)
        self.late_at = -math.inf
        self._metrics = metrics
        self._now = now

    def race(
        self, nbytes: int, stakes: Stakes, *, elsewhere_s: float = 0.0, whole: bool = False
    ) -> Race | None:
        """Return the terms on which to bring `nbytes` up; None: computing them is faster.

        elsewhere_s, whole: as of `Race`."""
        race = self.pace.race(nbytes, stakes, elsewhere_s=elsewhere_s, whole=whole)
        decision = "refuse" if race is None else "load" if race.predicted_s else "explore"
        self._metrics.load_decisions.labels(decision).inc()
        return race

    async def wait(
        self,
        parts: Mapping[asyncio.Task[Any], int],
        nbytes: int,
        *,
        began: float,
        deadline: float,
        race: Race | None,
        arrived: Callable[[], bool],
        teaches: bool = True,
    ) -> Ended:
        """Wait for the parts of a load, for as long as that is worth it; nothing is cancelled.

        parts: in prefix order, with what each counts beside the others. One that returns False was
        not brought, and what is behind a part that is missing is of no use. arrived: asked when all
        have ended, whether they brought everything; else there is nothing to learn from how long
        they took. teaches: there is; not if they had to be computed first.
        """
        pending, in_order = set(parts), deque(parts)
        came, whole = 0, sum(parts.values())
        when = asyncio.ALL_COMPLETED if race is None else asyncio.FIRST_COMPLETED
        while pending:
            while in_order and was_brought(in_order[0]):
                came += parts[in_order.popleft()]
            until = deadline if race is None else min(deadline, race.until(came / whole))
            timeout_s = until - self._now()
            if timeout_s <= 0:
                break
            _, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=when)
        if not pending:
            if teaches and arrived():
                self._learn(nbytes, self._now() - began, race)
            return Ended.DONE
        if race is None or self._now() >= deadline:
            if teaches:
                self.late_at = self._now()
            return Ended.LATE
        self._metrics.load_decisions.labels("cut").inc()
        if teaches:
            self._see_through(pending, nbytes, began)
        return Ended.CUT

    def _see_through(self, late: set[asyncio.Task[Any]], nbytes: int, began: float) -> None:
        """See the rest through, while nobody waits: until it has ended, the tier is slow."""
        left = set(late)

        def ended(part: asyncio.Task[Any]) -> None:
            left.discard(part)
            if not left:
                self.pace.caught_up()
                self.pace.note(nbytes, self._now() - began)

        self.pace.fell_behind()
        for part in late:
            part.add_done_callback(ended)

    def _learn(self, nbytes: int, took_s: float, race: Race | None) -> None:
        self.pace.note(nbytes, took_s)
        if race is not None and race.predicted_s is not None:
            self._metrics.load_predicted_seconds.observe(race.predicted_s)
            self._metrics.load_seconds.observe(took_s)


def was_brought(part: asyncio.Task[Any]) -> bool:
    """Say whether a part has ended, and brought what it was to bring."""
    failed = not part.done() or part.cancelled() or part.exception() is not None
    return not failed and part.result() is not False
