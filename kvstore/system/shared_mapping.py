"""Shared memory mapped where its huge pages can be mapped whole.

Where a mapping begins decides whether one entry of the page tables stands for 2 MiB of it, or 512
entries for as many small pages, each entered by a fault of its own at the first write. Python's
`mmap` leaves it to the kernel, which aligns shared memory only where a setting of the host says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

HUGE_NBYTES = 2 << 20  # of a huge page
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NOWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
]  # fmt: skip


class SharedMapping:
    """The first `nbytes` of a file, mapped. The descriptor is the caller's, who may close it."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        """Raises OSError, and ValueError for no bytes."""
        if nbytes <= 0:
            raise ValueError(f"a mapping of {nbytes} bytes")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.nbytes = nbytes
        try:
            self._room = mmap.mmap(-1, nbytes + HUGE_NBYTES, flags=_NOWHERE, prot=access)
        except OSError:  # a host that promises no memory twice: then where the kernel likes
            self._room = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
            self._offset = 0
            return
        begin = np.frombuffer(self._room, np.uint8).ctypes.data
        self._offset = -begin % HUGE_NBYTES
        shared = mmap.MAP_SHARED | _MAP_FIXED  # in place of what was kept free for it
        if _libc.mmap(begin + self._offset, nbytes, access, shared, fd, 0) == _MAP_FAILED:
            error = ctypes.get_errno()
            self._room.close()
            raise OSError(error, os.strerror(error))

    def view(self) -> memoryview:
        """Return all of it, writable unless it was mapped to be read. This and every part of it is
        valid for as long as somebody has it. Raises ValueError if it is unmapped."""
        return memoryview(self._room)[self._offset : self._offset + self.nbytes]

    def hide(self) -> None:
        """Leave it out of core dumps, whoever makes them."""
        self._room.madvise(mmap.MADV_DONTDUMP)

    def close(self) -> bool:
        """Unmap it, unless somebody has a part of it; return whether it is unmapped. It ends with
        the last part of it, and with the last reference to this, as well."""
        try:
            self._room.close()
        except BufferError:
            return False
        return True
