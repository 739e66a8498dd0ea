"""Room in the file tier: found by evicting, run by run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.decide.planner import Planner
from kvstore.model.errors import Unavailable
from kvstore.tier.file import Devices, Placed

EVICT_ROUNDS_MAX = 8


class FileRoom:
    """Makes room for frames. index_oldest: indexes some more of what was found on disk; False:
    all of it is indexed."""

    def __init__(self, planner: Planner, file: Devices, index_oldest: Callable[[], bool]) -> None:
        self._planner = planner
        self._file = file
        self._index_oldest = index_oldest
        self._finding_room = asyncio.Lock()
        self._wanted_nbytes = 0  # of the runs for which room is being found

    async def find(self, nbytes: int) -> Placed:
        """Find room in the file tier, evicting for it. Raises Unavailable if there is none.

        One run after the other, so that nobody takes what another one made room for; whose turn it
        is makes room for those who wait, too, because winning it back takes a while.
        """
        self._wanted_nbytes += nbytes
        try:
            async with self._finding_room:
                return await self._find_room(nbytes)
        finally:
            self._wanted_nbytes -= nbytes

    async def _find_room(self, nbytes: int) -> Placed:
        for _ in range(EVICT_ROUNDS_MAX):
            place = self._file.frames.allocate(nbytes)
            if place is not None:
                return place
            coming = self._file.space.freeing_nbytes
            missing = self._wanted_nbytes - self._file.space.available_nbytes - coming
            if missing > 0 or not coming:
                coming += self._evict(max(missing, nbytes), self._file.space.frees_room)
            if not coming:
                break
            await self._file.settle()
        raise Unavailable("the file tier is full and nothing in it may leave now")

    def evict_excess(self) -> None:
        """Get under the caps: one was cut, holes punched before a power cut are data again, or
        others fill the disk."""
        for mount in self._file.mounts:
            for _ in range(EVICT_ROUNDS_MAX):
                excess = -mount.tier.space.available_nbytes - mount.tier.space.freeing_nbytes
                if excess <= 0 or not mount.tier.space.segments.hold_runs:
                    break
                if not self._evict(excess, mount.holds):
                    break

    def _evict(self, nbytes: int, helps: Callable[[Placed], bool]) -> int:
        """Make room for frames; returns the bytes that will come back, which may be fewer.

        What is oldest may not be indexed yet, and only what is indexed can leave.
        """
        coming = self._planner.eviction.evict_file(nbytes, helps)
        for _ in range(EVICT_ROUNDS_MAX):
            if coming or not self._index_oldest():
                break
            coming = self._planner.eviction.evict_file(nbytes, helps)
        return coming
