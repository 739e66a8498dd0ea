"""Reads and writes past the page cache, and the room that a run takes.

A RAM disk has no page cache to pass by. Linux lets its files be opened with O_DIRECT since 6.6; on
an older one they are opened without it, and so is what any other file system refuses.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.model.errors import Unavailable
from kvstore.model.words import size
from kvstore.system.memory import read_memory

_IN_MEMORY = {"tmpfs", "ramfs"}


@contextmanager
def opened_direct(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file with O_DIRECT, or without it where that is refused. Raises OSError."""
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def takes_direct(directory: Path) -> bool:
    """Return whether files of a directory can be opened with O_DIRECT. Raises OSError."""
    with tempfile.NamedTemporaryFile(prefix="kvstore-bench-", dir=directory) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


def write_direct(path: Path, nbytes: int, step_nbytes: int) -> None:
    """Write a file of `nbytes`, step by step, and sync it. Raises Unavailable, OSError."""
    with (
        opened_direct(path, os.O_WRONLY | os.O_CREAT) as fd,
        mmap.mmap(-1, step_nbytes) as buffer,
    ):
        buffer.write(os.urandom(step_nbytes))
        for offset in range(0, nbytes, step_nbytes):
            if os.pwritev(fd, [buffer], offset) != step_nbytes:
                raise Unavailable("the disk is full")
        os.fsync(fd)


def check_room(directory: Path, files_nbytes: int, arena_nbytes: int) -> None:
    """Find out before a run that its files do not fit into a directory, nor with the arena into
    memory where that directory lies in memory. Raises Unavailable."""
    space = os.statvfs(directory)
    free = space.f_frsize * space.f_bavail
    less = "take fewer --blocks or --rounds"
    if files_nbytes > free:
        raise Unavailable(f"{directory} has {size(free)} free of {size(files_nbytes)}: {less}")
    wanted, spare = files_nbytes + arena_nbytes, read_memory().spare_nbytes
    if _in_memory(directory) and wanted > spare:
        raise Unavailable(
            f"{directory} is memory, and files and arena need {size(wanted)} of it, where "
            f"{size(max(0, spare))} can be taken: {less}"
        )


def _in_memory(directory: Path) -> bool:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0] in _IN_MEMORY
    return False
