"""What a hostile client of the same user does to the arena: give its memory to the system."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PUNCH_HOLE = 3  # with FALLOC_FL_KEEP_SIZE, without which the kernel refuses it
_FS_IOC_SETFLAGS = 0x40086602
_PIDFD_GETFD = 438  # Linux 5.6
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Punch a hole. Raises OSError."""
    if _libc.fallocate(fd, _PUNCH_HOLE, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def give_back(view: memoryview) -> None:
    """Punch a hole where the first page of a mapped view is. Raises OSError."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if _libc.madvise(address, mmap.PAGESIZE, mmap.MADV_REMOVE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def allow_holes(fd: int) -> None:
    """Undo what forbids them, where that was possible: this user may do that as well."""
    with suppress(OSError):
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("l", 0))


@contextmanager
def shared_extents(pid: int) -> Iterator[list[int]]:
    """Yield descriptors of the extents that this process has mapped of the daemon `pid`. A client
    is sent them, and closes them; one that means harm keeps them."""
    with open("/proc/self/maps", encoding="ascii") as file:
        ours = {line.split()[4] for line in file if "memfd:kvstore-arena" in line}
    files = [link for link in _arena_files(pid) if str(link.stat().st_ino) in ours]
    found = [_taken(pid, int(link.name)) for link in files]
    try:
        yield found
    finally:
        for fd in found:
            os.close(fd)


def _taken(pid: int, number: int) -> int:
    """Return a descriptor of what another process of this user has as `number`."""
    process = os.pidfd_open(pid)
    try:
        fd = _libc.syscall(_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(fd)


def _arena_files(pid: int) -> list[Path]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if link.readlink().name.startswith("memfd:kvstore-arena"):
                found.append(link)
    return found
