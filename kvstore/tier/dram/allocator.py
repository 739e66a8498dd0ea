"""Cut one extent into slots of any page-aligned size: best fit, coalescing.

Several record sizes live side by side, and namespaces are added and deleted. Fixed size classes
would strand memory in the class of yesterday's model. Free runs of pages are merged with their
neighbours on every free and found by size. A KV cache has few distinct sizes, so best fit leaves
few gaps.

Coded records have a few sizes a page or two apart. A run that is a little larger than a slot is
kept for the next slot of its own size, as long as few are: else what is left of it serves nobody,
and the larger slot has to be made of two that come free side by side.

Models with windows have records of many layers beside those of a few. Of runs that fit equally
well, slots of usual size take the lowest, and larger ones the end of the highest: so the two keep
apart, and what comes free side by side is of a kind.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.errors import InvalidRequest

LITTLE = 8  # less than so much of a slot is little: nothing fits what is left
KEPT_SHARE = 128  # of an extent: what is kept free at most
LARGE = 1.3  # times the mean of the slots lately
MEMORY = 1024  # slots that the mean is of


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
        self._runs: dict[int, list[int]] = {}  # size of free runs -> their starts, sorted
        self._sizes: list[int] = []  # keys of _runs, sorted
        self._mean = 0.0
        self._add(0, capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free run of `nbytes`, or None. Then some of the extent, a
        KEPT_SHARE of it at most, may be runs that would do: they are kept for larger slots."""
        size = padded(nbytes)
        self._mean += (size - self._mean) / MEMORY if self._mean else size
        found = self._best_run(size)
        if found is None:
            return None
        is_large = size > LARGE * self._mean
        begin = self._runs[found][-1 if is_large else 0]
        end = begin + found
        self._remove(begin, end)
        start = end - size if is_large else begin
        if begin < start:
            self._add(begin, start)
        if start + size < end:
            self._add(start + size, end)
        self.used += size
        self._live[start] = size
        return start

    def _best_run(self, size: int) -> int | None:
        """Return the size of the runs to take `size` bytes from."""
        kept = 0
        for at in range(bisect_left(self._sizes, size), len(self._sizes)):
            found = self._sizes[at]
            if found == size or found - size >= size // LITTLE:
                return found
            kept += found * len(self._runs[found])
            if kept > self.capacity // KEPT_SHARE:
                return found
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate(nbytes)` returned. Raises InvalidRequest for anything else."""
        size = padded(nbytes)
        if not self.holds(offset, nbytes):
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
            start = self._runs[size][-1]
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
        if size not in self._runs:
            self._runs[size] = []
            insort(self._sizes, size)
        insort(self._runs[size], start)

    def _remove(self, start: int, end: int) -> None:
        del self._start_of[end], self._end_of[start]
        size = end - start
        starts = self._runs[size]
        del starts[bisect_left(starts, start)]
        if not starts:
            del self._runs[size]
            del self._sizes[bisect_left(self._sizes, size)]
