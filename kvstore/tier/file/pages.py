"""Memory that O_DIRECT accepts: page-aligned, from anonymous mappings."""

from __future__ import annotations

import mmap

from kvstore.model.block import PAGE_NBYTES, Buffer, padded
from kvstore.model.checksum import copy_bytes

_POOL_GROWTH_PAGES = 64


def aligned_buffer(nbytes: int) -> memoryview:
    """Return zeroed memory of `nbytes`, rounded up to whole pages."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping would be a file in memory
    return memoryview(mmap.mmap(-1, max(padded(nbytes), PAGE_NBYTES), private))


def aligned_copy(data: Buffer) -> memoryview:
    """Return bytes, filled up with zeros to whole pages, in aligned memory."""
    buffer = aligned_buffer(len(data))
    copy_bytes(memoryview(data), buffer[: len(data)])
    return buffer


class PagePool:
    """Reuse header pages. It holds as many as there ever were writes in flight at once."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return one page; its content is unspecified."""
        if not self._free:
            chunk = aligned_buffer(_POOL_GROWTH_PAGES * PAGE_NBYTES)
            self._free = [
                chunk[start : start + PAGE_NBYTES] for start in range(0, len(chunk), PAGE_NBYTES)
            ]
        return self._free.pop()

    def give(self, page: memoryview) -> None:
        """Take a page back."""
        self._free.append(page)
