"""What core dumps and other processes may see of this one."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def forbid_dumps() -> None:
    """Let the kernel write no core dump of this process, and let no other process of this user
    read its memory."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
