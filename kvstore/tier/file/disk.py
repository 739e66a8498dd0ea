"""The system calls of the file tier. Tests replace them by a simulated disk."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Sizes(NamedTuple):
    """Length of a file, and the bytes its blocks really take."""

    nbytes: int
    physical_nbytes: int


class Disk(Protocol):
    """Calls that block. All raise OSError. Threads of the tier's pool make them, never its loop."""

    def make_directory(self, path: Path) -> None:
        """Make `path` (0700) and its parents durably; fine if it is there."""

    def lock(self, path: Path) -> int:
        """Create and lock a file, return its descriptor. BlockingIOError if another holds it."""

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory."""

    def open(
        self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False
    ) -> int:
        """Open a file; `create` (0600) fails if it exists; `direct` bypasses the page cache."""

    def close(self, fd: int) -> None: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write at most all of `buffers`; return how many bytes."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read at most what fills `buffers`; return how many bytes, 0 at the end of the file."""

    def fdatasync(self, fd: int) -> None: ...

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the blocks of a range back; it then reads as zeros, the length stays."""

    def next_data(self, fd: int, offset: int) -> int | None:
        """Return the first offset from `offset` on that is not in a hole, None if there is none."""

    def next_hole(self, fd: int, offset: int) -> int:
        """Return the first offset from `offset` on that is in a hole, at least the file's end."""

    def sizes(self, fd: int) -> Sizes: ...

    def unlink(self, path: Path) -> None: ...

    def sync_directory(self, path: Path) -> None:
        """Make creations and removals in a directory durable."""

    def free_nbytes(self, path: Path) -> int:
        """Return what may still be written to the file system of a directory."""


class RealDisk:
    """Linux."""

    def make_directory(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)  # another tenant may make it as well
            self.sync_directory(directory.parent)

    def lock(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def open(
        self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False
    ) -> int:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        flags |= (os.O_CREAT | os.O_EXCL if create else 0) | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        if _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, nbytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def next_data(self, fd: int, offset: int) -> int | None:
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole up to the end
                return None
            if error.errno == errno.EINVAL:  # the file system has no SEEK_DATA: all is data
                return offset
            raise

    def next_hole(self, fd: int, offset: int) -> int:
        try:
            return os.lseek(fd, offset, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return os.fstat(fd).st_size
            raise

    def sizes(self, fd: int) -> Sizes:
        status = os.fstat(fd)
        return Sizes(status.st_size, status.st_blocks * 512)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_nbytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_frsize * status.f_bavail
