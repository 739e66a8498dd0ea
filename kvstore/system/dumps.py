"""What core dumps and other processes may see of this one."""

from __future__ import annotations

import ctypes
import mmap

_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def forbid_dumps() -> None:
    """Let the kernel write no core dump of this process, and let no other process of this user
    read its memory."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def hide(mapped: mmap.mmap) -> None:
    """Leave a mapping out of core dumps, whoever makes them."""
    mapped.madvise(mmap.MADV_DONTDUMP)
