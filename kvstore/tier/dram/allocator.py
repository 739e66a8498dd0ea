"""Cut one extent into slots of any page-aligned size: best fit, coalescing.

Several record sizes live side by side, and namespaces are added and deleted. Fixed size classes
would strand memory in the class of yesterday's model. Free runs of pages are merged with their
neighbours on every free and found by size. A KV cache has few distinct sizes, so best fit leaves
few gaps.

A run is cut beside the neighbour that came last. Prefixes leave one after the other, so what came
long ago leaves soon, and what is left of the run grows by it. Cut at the other side, it would be
shut in by the new slot and serve nobody for as long as that lives. Nor do slots that come together
have gaps between them then, so they leave large runs when they go together. This matters where
records have several sizes: coded ones a few pages apart, or those of layers with windows, which are
as large as several others.

A run that is a little larger than a slot is kept for the next slot of its own size, as long as few
are: else what is left of it serves nobody.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.errors import InvalidRequest

LITTLE = 8  # less than so much of a slot is little: nothing fits what is left
KEPT_SHARE = 256  # of an extent: what is kept free at most
STRIP_NBYTES = 64 << 10
"""When slots came is known by strips: exactly of slots as large as one, of which no two begin or
end in the same; of smaller ones roughly. A strip takes 16 bytes, however many slots are in it."""


class ExtentAllocator:
    """Free space of one extent of `capacity` bytes. Sizes are rounded up to 4 KiB pages.

    used: bytes of slots. withdrawn: bytes taken out of use for good.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.withdrawn = 0
        self._live: dict[int, int] = {}  # offset of a slot -> its size
        self._start_of: dict[int, int] = {}  # end of a free run -> its start
        self._end_of: dict[int, int] = {}  # start of a free run -> its end
        self._runs: dict[int, set[int]] = {}  # size of free runs -> their starts
        self._sizes: list[int] = []  # keys of _runs, sorted
        strips = capacity // STRIP_NBYTES + 1
        self._slots = 0  # ever
        self._began = (
            array("Q", [0]) * strips
        )  # by strip: number of the last slot that begins there
        self._ended = array("Q", [0]) * strips  # the same of one that ends there
        self._add(0, capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free run of `nbytes`, or None. Then some of the extent, a
        KEPT_SHARE of it at most, may be runs that would do: they are kept for larger slots."""
        size = padded(nbytes)
        found = size if size in self._runs else self._best_run(size)
        if found is None:
            return None
        start = next(iter(self._runs[found]))
        end = start + found
        self._remove(start, end)
        offset = start
        if size < found:
            if self._is_newer_after(start, end):
                offset = end - size
                self._add(start, offset)
            else:
                self._add(start + size, end)
        self.used += size
        self._live[offset] = size
        self._slots = number = self._slots + 1
        self._began[offset // STRIP_NBYTES] = number
        self._ended[(offset + size - 1) // STRIP_NBYTES] = number
        return offset

    def _is_newer_after(self, start: int, end: int) -> bool:
        """Say whether what comes after a run is newer than what is before it. The edges of the
        extent never leave; but a new extent is filled from its start on."""
        if not start:
            return False
        if end == self.capacity:
            return self._ended[(end - 1) // STRIP_NBYTES] > 0
        return self._began[end // STRIP_NBYTES] > self._ended[(start - 1) // STRIP_NBYTES]

    def _best_run(self, size: int) -> int | None:
        """Return the size of the runs to take `size` bytes from: larger ones."""
        kept = 0
        for at in range(bisect_left(self._sizes, size), len(self._sizes)):
            found = self._sizes[at]
            if found - size >= size // LITTLE:
                return found
            kept += found * len(self._runs[found])
            if kept > self.capacity // KEPT_SHARE:
                return found
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate(nbytes)` returned. Raises InvalidRequest for anything else."""
        size = padded(nbytes)
        if self._live.get(offset) != size:
            raise InvalidRequest(f"no slot of {nbytes} bytes at {offset}")
        del self._live[offset]
        start, end = offset, offset + size
        self.used -= size
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start, offset)
        if end in self._end_of:
            neighbour = end
            end = self._end_of[neighbour]
            self._remove(neighbour, end)
        self._add(start, end)

    def withdraw(self, nbytes: int) -> list[tuple[int, int]]:
        """Take free runs of up to `nbytes` out of use for good, the largest first.

        Returns them as (begin, end). They are whole pages, and are never allocated again.
        """
        taken: list[tuple[int, int]] = []
        left = nbytes // PAGE_NBYTES * PAGE_NBYTES
        while left and self._sizes:
            size = self._sizes[-1]
            start = next(iter(self._runs[size]))
            end = start + size
            self._remove(start, end)
            begin = max(start, end - left)
            if start < begin:
                self._add(start, begin)
            taken.append((begin, end))
            left -= end - begin
        self.withdrawn += sum(end - begin for begin, end in taken)
        return taken

    def holds(self, offset: int, nbytes: int) -> bool:
        """Tell whether this is a slot that was allocated and not freed."""
        return self._live.get(offset) == padded(nbytes)

    def _add(self, start: int, end: int) -> None:
        self._start_of[end], self._end_of[start] = start, end
        size = end - start
        starts = self._runs.get(size)
        if starts is None:
            self._runs[size] = {start}
            insort(self._sizes, size)
        else:
            starts.add(start)

    def _remove(self, start: int, end: int) -> None:
        del self._start_of[end], self._end_of[start]
        size = end - start
        starts = self._runs[size]
        starts.discard(start)
        if not starts:
            del self._runs[size]
            del self._sizes[bisect_left(self._sizes, size)]
