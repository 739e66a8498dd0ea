"""Memory between a medium and a slot, used again by all tiers of the process.

Memory that was never touched before costs more than encrypting it, because the kernel has to map
and clear its pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvstore.model.block import PAGE_NBYTES
from kvstore.system.shared_mapping import HUGE_NBYTES

NBYTES_MIN = 64 << 10
KEPT_NBYTES = 64 << 20  # of buffers that nobody uses now


class Bounces:
    """Aligned buffers that core dumps leave out. Safe to use in several threads."""

    def __init__(self, kept_nbytes: int = KEPT_NBYTES) -> None:
        self._kept_nbytes = kept_nbytes
        self._free: dict[int, list[memoryview]] = {}  # by size; append and pop are atomic

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[memoryview]:
        """Hold `nbytes` or more, with a page behind them for a tag. What is in them is unspecified.

        After an error the memory is not used again: a thread may still hold it.
        """
        size = max(NBYTES_MIN, 1 << (nbytes - 1).bit_length()) + PAGE_NBYTES
        if size > HUGE_NBYTES // 2:  # the kernel aligns whole huge pages alone
            size = -(-size // HUGE_NBYTES) * HUGE_NBYTES
        free = self._free.setdefault(size, [])
        try:
            bounce = free.pop()
        except IndexError:
            bounce = _hidden(size)
        yield bounce
        if sum(each * len(some) for each, some in list(self._free.items())) < self._kept_nbytes:
            free.append(bounce)


def _hidden(nbytes: int) -> memoryview:
    # Private: the kernel makes no huge pages for a shared mapping.
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTDUMP)
    with suppress(OSError):  # a kernel without
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


BOUNCES = Bounces()  # several tenants' tiers keep no more than one would
