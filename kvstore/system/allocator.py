"""The C library's heap."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE_NBYTES = 1 << 15


def keep_large_apart() -> None:
    """Let what is large have memory of its own, which goes back to the system when it is freed.

    glibc puts it into the heap once some of it was freed, between small things that stay: there it
    leaves holes, of 30 bytes for each block that a daemon announces. Other C libraries do as they
    do.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_NBYTES)
