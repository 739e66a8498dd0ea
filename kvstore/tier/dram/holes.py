"""Memory given back to the system: free runs below a lowered cap, and holes that clients punch."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence

from kvstore.system.threads import Threads, ended
from kvstore.tier.dram.extent_memory import present_nbytes, punch, refill
from kvstore.tier.dram.extents import Extent, Extents, Run
from kvstore.tier.dram.growth import Growth
from kvstore.tier.dram.retired import RetiredExtent

logger = logging.getLogger(__name__)

THREADS = 8  # that punch holes; an extent has one at a time
RENEWED_SHARE = 16  # a renewal frees at least this share of the arena at once


class ArenaHoles:
    """starved: a record found no run of free memory although the cap had room."""

    def __init__(self, extents: Extents, growth: Growth) -> None:
        self.starved = False
        self._extents = extents
        self._growth = growth
        self._threads = Threads(THREADS, thread_name_prefix="kvstore-holes")
        self._giving: dict[int, asyncio.Task[None]] = {}  # by extent
        self._punching_again: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Punch no more holes. Threads that do have descriptors of their own."""
        for task in self._giving.values():
            task.cancel()
        if self._punching_again is not None:
            self._punching_again.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def excess_nbytes(self) -> int:
        """Bytes by which a lowered cap is exceeded: see `give_back`."""
        return max(0, self._extents.nbytes - self._growth.capacity_bytes)

    def give_back(self) -> int:
        """Take the free memory beyond the cap out of use, and return how many bytes that is.

        `Extents.leaving_nbytes` says how much of it the system does not have yet. The newest
        extents come first, so that whole extents become empty.
        """
        excess = self.excess_nbytes
        newest = sorted(self._extents, key=lambda each: -each.handle.id)
        self._release(self._withdraw(newest, excess))
        return excess - self.excess_nbytes

    async def given_back(self, timeout_s: float | None = None) -> None:
        """Wait until the system has all that was taken out of use, or the time is over."""
        await ended(list(self._giving.values()), timeout_s)

    async def give_back_all(self) -> None:
        """Give every extent back to the system, whatever is in it and whoever has it mapped: the
        arena is used no more. `renew` goes on to look after them, as after all retired ones."""
        self._growth.set_capacity(0)
        self.starved = False
        await asyncio.gather(*map(self._give_back_whole, list(self._extents)))

    async def _give_back_whole(self, extent: Extent) -> None:
        number, nbytes = extent.handle.id, extent.handle.nbytes
        left = await self._punch_file(number, extent.handle.fd, [(0, nbytes)], extent.lock)
        extent.left_nbytes = left or 0
        self._extents.retire(extent)

    def _withdraw(self, extents: Sequence[Extent], left: int) -> list[Extent]:
        """Take free runs of so many bytes out of use. `_release` the extents that had them."""
        taken: list[Extent] = []
        for extent in extents:
            if left <= 0:
                break
            if nbytes := self._extents.withdraw(extent, left):
                taken.append(extent)
                left -= nbytes
        return taken

    def _release(self, extents: Sequence[Extent]) -> list[asyncio.Task[None]]:
        """Let threads give what leaves these extents back to the system; returns tasks that wait.

        The kernel takes a quarter of a second of a processor for a gigabyte, for one thread at a
        time in an extent. So every extent has a thread of its own, which next takes all that has
        left its extent meanwhile. More threads get a larger part of processors that are busy.
        """
        for extent in extents:
            number = extent.handle.id
            if number not in self._giving:
                self._giving[number] = asyncio.create_task(self._empty(extent))
        return [self._giving[extent.handle.id] for extent in extents]

    async def _empty(self, extent: Extent) -> None:
        """Give back what leaves an extent, until nothing does."""
        try:
            while extent.leaving:
                runs, extent.leaving = extent.leaving, []
                try:
                    await self._punch(extent, runs)
                finally:
                    self._extents.leaving_nbytes -= _nbytes(runs)
        finally:
            del self._giving[extent.handle.id]
        if not extent.nbytes:
            self._extents.retire(extent)

    async def renew(self) -> int:
        """Look after extents with holes, and after retired ones, now and then.

        Pages that were given back and that a client has touched since are given back once more, by
        a task, while others are looked after; returns how many bytes that were. When records find
        no run between the holes that is long enough, the free runs there are given back too, and
        new extents are made.
        """
        holey = [extent for extent in self._extents if extent.withdrawn]
        touched = 0
        if self._punching_again is None or self._punching_again.done():
            touched = self._punch_touched(holey)
        free = sum(extent.nbytes - extent.space.used for extent in holey)
        enough = min(self._growth.extent_bytes, self._growth.capacity_bytes // RENEWED_SHARE)
        if self.starved and free >= enough:
            await ended(self._release(self._withdraw(holey, free)))
            self._growth.set_capacity(self._growth.capacity_bytes)
        self.starved = False
        return touched

    def _punch_touched(self, holey: Sequence[Extent]) -> int:
        """Let a task give back what clients have touched of extents with holes, and of retired
        ones; return how many bytes that are. What a punch has left there, nobody has touched."""
        touched, extents = 0, []
        for extent in holey:
            if extent.handle.id in self._giving:
                continue
            if (there := present_nbytes(extent.handle.fd) - extent.nbytes) > 0:
                extents.append(extent)
                touched += max(0, there - extent.left_nbytes)
        retired = self._extents.retired.back()
        for each, nbytes in retired:
            more = max(0, nbytes - each.left_nbytes)
            touched += more
            if more and not each.touched:
                each.touched = True
                logger.warning("arena=touched_again extent=%d bytes=%d", each.id, more)
        if extents or retired:
            again = self._punch_again(extents, [each for each, _ in retired])
            self._punching_again = asyncio.create_task(again)
        return touched

    async def _punch_again(
        self, extents: Sequence[Extent], retired: Sequence[RetiredExtent]
    ) -> None:
        for extent in extents:
            if extent.handle.id not in self._giving:
                await self._punch(extent, extent.withdrawn)
        for each in retired:
            if not each.closed:  # let go while another was punched
                whole = [(0, each.nbytes)]
                left = await self._punch_file(each.id, each.fd, whole, each.lock)
                each.left_nbytes = each.left_nbytes if left is None else left

    async def _punch(self, extent: Extent, runs: Sequence[Run]) -> None:
        if extent.handle.closed:  # retired meanwhile
            return
        there = await self._punch_file(extent.handle.id, extent.handle.fd, runs, extent.lock)
        if there is not None:
            extent.left_nbytes = max(0, there - extent.nbytes)

    async def _punch_file(
        self, extent: int, of: int, runs: Sequence[Run], lock: threading.Lock
    ) -> int | None:
        """Punch holes; return how many bytes there are right after that, None if it failed. of: its
        descriptor, which the thread has one of its own of."""
        try:  # no descriptor may be left
            fd = os.dup(of)  # the thread may outlive this arena
            job = self._threads.submit(_punched, fd, tuple(runs), lock)
            job.add_done_callback(lambda _: os.close(fd))
            return await asyncio.wrap_future(job)
        except OSError as error:
            logger.warning("arena=not_given_back extent=%d reason=%r", extent, str(error))
            return None

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


def _punched(fd: int, runs: Sequence[Run], lock: threading.Lock) -> int:
    """Punch holes in a thread; return how many bytes there are before anybody else comes by."""
    punch(fd, runs, lock)
    return present_nbytes(fd)


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
