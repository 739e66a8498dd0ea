"""How soon the kernel runs a thread that has something to do, where others want its processor."""

from __future__ import annotations

import ctypes
import os

SLICE_NS = 100_000  # the shortest Linux grants
_SCHED_OTHER = 0
_RESET_ON_FORK = 1  # threads it starts get slices of the usual length
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, as its first version was."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def run_promptly() -> bool:
    """Ask for the calling thread to run soon after it wakes, in short slices. False: refused.

    For threads that sleep most of the time and answer others. From Linux 6.12 on a thread may ask
    for slices of its own length; shorter ones come sooner, and its share stays what it was. Needs
    no privilege. Without it such a thread waits for whoever runs to use up milliseconds. Threads it
    starts, which copy and hash, get slices as usual: cut short, they would lose their caches.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    wanted = _Attributes(
        size=ctypes.sizeof(_Attributes),
        policy=_SCHED_OTHER,
        flags=_RESET_ON_FORK,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime=SLICE_NS,
    )
    return bool(_libc.syscall(number, 0, ctypes.byref(wanted), 0) == 0)
