"""Memory given back to the system: free runs below a lowered cap, and holes that clients punch."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from kvstore.tier.dram.extent_memory import present_nbytes, punch, refill
from kvstore.tier.dram.extents import Extent, Extents, Run
from kvstore.tier.dram.growth import Growth

logger = logging.getLogger(__name__)

GIVE_BACK_STEP_NBYTES = 256 << 20
RENEWED_SHARE = 16  # a renewal frees at least this share of the arena at once


class ArenaHoles:
    """starved: a record found no run of free memory although the cap had room."""

    def __init__(self, extents: Extents, growth: Growth) -> None:
        self.starved = False
        self._extents = extents
        self._growth = growth

    @property
    def excess_nbytes(self) -> int:
        """Bytes by which a lowered cap is exceeded: see `give_back`."""
        return max(0, self._extents.nbytes - self._growth.capacity_bytes)

    def give_back(self) -> asyncio.Task[None] | None:
        """Take some of the free memory beyond the cap out of use; None: nothing is free.

        Returns the task that gives it back to the system. Several may run: the kernel works on one
        extent for one thread at a time, so extents that nobody works on come first. Of these the
        newest come first, so that whole extents become empty.
        """
        extents = sorted(self._extents, key=lambda each: (each.punches, -each.handle.id))
        taken = self._withdraw(extents, min(self.excess_nbytes, GIVE_BACK_STEP_NBYTES))
        return asyncio.create_task(self._release(taken)) if taken else None

    def _withdraw(self, extents: Sequence[Extent], left: int) -> list[tuple[Extent, list[Run]]]:
        """Take free runs of so many bytes out of use. `_release` them."""
        taken: list[tuple[Extent, list[Run]]] = []
        for extent in extents:
            if left <= 0:
                break
            runs = extent.space.withdraw(left)
            if runs:
                extent.withdrawn += runs
                taken.append((extent, runs))
                left -= _nbytes(runs)
        self._extents.leaving_nbytes += sum(_nbytes(runs) for _, runs in taken)
        return taken

    async def _release(self, taken: Sequence[tuple[Extent, list[Run]]]) -> None:
        """Give runs that were taken out of use back to the system."""
        try:
            await asyncio.gather(*(self._punch(extent, runs) for extent, runs in taken))
        finally:
            self._extents.leaving_nbytes -= sum(_nbytes(runs) for _, runs in taken)
        for extent, _ in taken:
            if not extent.nbytes and not extent.punches:
                self._extents.retire(extent)

    async def renew(self) -> None:
        """Look after extents with holes, now and then.

        Pages that were given back and that a client has touched since are given back once more.
        When records find no run between the holes that is long enough, the free runs there are
        given back too, and new extents are made.
        """
        holey = [extent for extent in self._extents if extent.withdrawn]
        for extent in holey:
            if not extent.handle.closed and present_nbytes(extent.handle.fd) > extent.nbytes:
                await self._punch(extent, extent.withdrawn)
        free = sum(extent.nbytes - extent.space.used for extent in holey)
        enough = min(self._growth.extent_bytes, self._growth.capacity_bytes // RENEWED_SHARE)
        if self.starved and free >= enough:
            await self._release(self._withdraw(holey, free))
            self._growth.set_capacity(self._growth.capacity_bytes)
        self.starved = False

    async def _punch(self, extent: Extent, runs: Sequence[Run]) -> None:
        if extent.handle.closed:  # retired meanwhile
            return
        try:  # no descriptor may be left
            fd = os.dup(extent.handle.fd)  # the thread may outlive this arena
            extent.punches += 1
            try:
                await asyncio.to_thread(punch, fd, tuple(runs), extent.lock)
            finally:
                extent.punches -= 1
        except OSError as error:
            logger.warning("arena=not_given_back extent=%d reason=%r", extent.handle.id, str(error))

    def punched(self) -> list[tuple[int, int]]:
        """Return extents into which a client has punched holes, and how many bytes each lacks."""
        found = [
            (each.handle.id, each.nbytes - present_nbytes(each.handle.fd)) for each in self._extents
        ]
        return [(extent, missing) for extent, missing in found if missing > 0]

    async def refill(self, extent: int) -> None:
        """Reserve the pages that an extent lacks again; they hold zeros. Raises OSError without
        memory."""
        punched = self._extents.by_id.get(extent)
        if punched is None:  # retired meanwhile
            return
        fd = os.dup(punched.handle.fd)  # the thread may outlive this arena
        kept = _complement(punched.withdrawn, punched.handle.nbytes)
        await asyncio.to_thread(refill, fd, kept, punched.lock)


def _nbytes(runs: Sequence[Run]) -> int:
    return sum(end - begin for begin, end in runs)


def _complement(runs: Sequence[Run], end: int) -> list[Run]:
    """Return the ranges between 0 and `end` that are in no run."""
    kept: list[Run] = []
    at = 0
    for begin, stop in sorted(runs):
        if at < begin:
            kept.append((at, begin))
        at = stop
    if at < end:
        kept.append((at, end))
    return kept
