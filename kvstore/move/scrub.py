"""Reads frames again, slowly, and verifies them.

A disk that rots is found while the arena may still have a good copy, which is then written anew,
and before anybody waits for the bytes. The idea is that of ZFS: nothing else ever reads cold data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstore.decide.planner import Planner
from kvstore.metrics import Metrics
from kvstore.model.errors import KVStoreError
from kvstore.move.write_behind import WriteBehind

logger = logging.getLogger(__name__)

START_S = 60.0  # a daemon that has just started has better things to do
LOOK_S = 1.0
GIVE_WAY_S = 0.05
GIVE_WAY_S_MAX = 1.0  # then it goes on beside the readers: rot must be found on a busy node, too
FAILED_S = 60.0
PAUSE_S_MAX = 600.0  # what a large frame takes at the slowest rates, and a new rate waits for


class Scrub:
    """One task beside the store's. `nbytes_per_s`: at most, 0 is off; `every_s`: how often for one
    frame. Both may change while it runs."""

    def __init__(
        self,
        planner: Planner,
        write_behind: WriteBehind,
        *,
        nbytes_per_s: int,
        every_s: float,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._write_behind = write_behind
        self.nbytes_per_s = nbytes_per_s
        self.every_s = every_s
        self._metrics = metrics
        self._now = now

    async def run(self) -> None:
        """Scrub until cancelled."""
        pause_s = min(START_S, self.every_s)
        while True:
            await asyncio.sleep(pause_s)
            pause_s = await self._step()

    async def _step(self) -> float:
        """Check one frame, if one is due. Returns how long to pause."""
        if not self.nbytes_per_s:  # off, for now
            return LOOK_S
        await self._give_way()
        began = self._now()
        check = self._planner.checks.next(began - self.every_s)
        if check is None:
            return LOOK_S
        bad: Sequence[int] = ()
        try:
            bad = await self._write_behind.reads.check(check)
        except KVStoreError as error:
            self._metrics.read_errors.inc()
            logger.warning("scrub=failed reason=%r", str(error))
            return FAILED_S
        finally:
            self._planner.checks.done(check, bad)
        if bad:
            self._metrics.corrupt_blocks.labels("scrub").inc(len(bad))
            logger.warning("scrub=corrupt blocks=%d frame=%s", len(bad), check.frame.extent)
            self._write_behind.wake()
        rate = self.nbytes_per_s or 1  # it may have been switched off meanwhile
        return max(0.0, min(check.nbytes / rate, PAUSE_S_MAX) - (self._now() - began))

    async def _give_way(self) -> None:
        """Wait while somebody waits for the disk, for a while."""
        end = self._now() + GIVE_WAY_S_MAX
        while self._write_behind.reads.under_way and self._now() < end:  # noqa: ASYNC110 - not for one
            await asyncio.sleep(GIVE_WAY_S)
