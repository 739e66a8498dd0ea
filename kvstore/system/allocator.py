"""The C library's heap."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
# A socket is read into 256 KiB, which are had and given back with each read: not from the system.
LARGE_NBYTES = 1 << 19
FREE_NBYTES = 1 << 21  # at the end of the heap, that stay there


def keep_large_apart() -> None:
    """Let what is large have memory of its own, which goes back to the system when it is freed.

    glibc puts it into the heap once some of it was freed, between small things that stay: there it
    leaves holes, of 30 bytes for each block that a daemon announces. Other C libraries do as they
    do.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_NBYTES)
        library.mallopt(_M_TRIM_THRESHOLD, FREE_NBYTES)
