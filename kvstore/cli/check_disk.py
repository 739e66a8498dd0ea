"""What the file tier needs of its directory: rights, room, O_DIRECT, holes, speed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.client.trust import user_name
from kvstore.model.words import size
from kvstore.settings import FileSettings
from kvstore.store.findings import Finding, note, ok, wrong
from kvstore.tier.file import RealDisk

PROBE_NBYTES = 64 << 20
STEP_NBYTES = 4 << 20
PROBE_S = 2.0
# Below this even a small model computes a prefix faster than it is read.
SLOW_BYTES_PER_S = 200 << 20
_VOLATILE = {
    "tmpfs": "memory: it survives a restart of the daemon, not of the machine",
    "ramfs": "memory: it survives a restart of the daemon, not of the machine",
    "overlay": "the container's own layer: it is gone with the container",
}


def check_disk(settings: FileSettings) -> Iterator[Finding]:
    """Yield findings about each directory of file.path. Leaves nothing behind."""
    paths = [Path(path) for path in settings.paths]
    if not paths:
        yield note("file tier", "file.path is empty: nothing survives a restart")
        return
    for path in paths:
        device = os.stat(_existing(path)).st_dev
        on_it = [each for each in paths if os.stat(_existing(each)).st_dev == device]
        if len(on_it) > 1:
            yield note(
                "disk",
                f"{path} shares its file system with {len(on_it) - 1} more: they fail together",
                "name one directory for each disk",
            )
        yield from _check_directory(settings, path, on_it)


def _existing(path: Path) -> Path:
    """Return the directory that is there, or that it would be made in, as far as one may see."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _check_directory(settings: FileSettings, path: Path, on_it: list[Path]) -> Iterator[Finding]:
    """on_it: all directories on its file system."""
    there = _existing(path)
    if not there.is_dir():
        yield wrong("directory", f"{there} is not a directory", "--set file.path=DIRECTORY")
        return
    if not os.access(there, os.W_OK | os.X_OK):
        yield wrong(
            "directory",
            f"{there} cannot be written by {user_name(os.geteuid())}",
            f"sudo install -d -m 700 -o {os.geteuid()} {path}",
        )
        return
    yield _medium(path, there)
    yield _room(settings.capacity_bytes, on_it, there)
    try:
        with _nameless_file(there) as fd:
            yield from _try_out(fd, settings)
    except OSError as error:
        yield wrong("disk", f"{there}: {error.strerror}", "check it with `df` and `dmesg`")


def _medium(path: Path, there: Path) -> Finding:
    kind = _file_system(there)
    text = f"{path} on {kind}" + ("" if path == there else " (made at the first start)")
    if kind in _VOLATILE:
        return note("directory", f"{text}, {_VOLATILE[kind]}", "--set file.path=/on/a/real/disk")
    return ok("directory", text)


def _room(capacity_bytes: int, paths: list[Path], there: Path) -> Finding:
    space = os.statvfs(there)
    free = space.f_frsize * space.f_bavail
    own = sum(map(_physical_nbytes, paths))
    text = f"{size(free)} free, {size(own)} taken; file.capacity is {size(capacity_bytes)}"
    share = (free + own) // len(paths)
    if share < capacity_bytes:
        return wrong(
            "room",
            f"{text}: the disk would be full before the cap is reached",
            f"--set file.capacity={max(1, int(share * 0.9) >> 20)}MiB, or a larger disk",
        )
    return ok("room", text)


def _physical_nbytes(path: Path) -> int:
    """Return what a directory takes, those of its tenants included."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total


def _try_out(fd: int, settings: FileSettings) -> Iterator[Finding]:
    space = os.fstatvfs(fd)
    if space.f_frsize * space.f_bavail < 2 * PROBE_NBYTES:
        yield note("disk speed", f"not measured: less than {size(2 * PROBE_NBYTES)} are free")
        return
    direct = settings.direct and _set_direct(fd)
    if settings.direct:
        yield (
            ok("O_DIRECT", "works")
            if direct
            else note(
                "O_DIRECT",
                "not on this file system: what is read and written takes page cache as well",
                "put file.path on ext4 or xfs",
            )
        )
    yield _speed(fd)
    yield _holes(fd)


def _set_direct(fd: int) -> bool:
    """Switch O_DIRECT on, if the file system has it and really takes a page."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        os.pwrite(fd, mmap.mmap(-1, mmap.PAGESIZE), 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False
    return True


def _speed(fd: int) -> Finding:
    """Measure one stream of writes with their fdatasync, then of reads; a thread of each."""
    buffer = memoryview(mmap.mmap(-1, STEP_NBYTES))
    buffer[:] = os.urandom(STEP_NBYTES)  # some disks make zeros disappear
    began = time.perf_counter()
    written = _steps(PROBE_NBYTES, lambda offset: os.pwrite(fd, buffer, offset))
    os.fdatasync(fd)
    write = written / (time.perf_counter() - began)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    read = _steps(written, lambda offset: os.preadv(fd, [buffer], offset))
    rate = read / (time.perf_counter() - began)
    text = f"writes {size(write)}/s, reads {size(rate)}/s (one request at a time)"
    if min(write, rate) < SLOW_BYTES_PER_S:
        return note(
            "disk speed",
            f"{text}: prefixes from this disk may be slower than computing them",
            "put file.path on NVMe",
        )
    return ok("disk speed", text)


def _steps(nbytes: int, step: Callable[[int], int]) -> int:
    """Do `step` for offset after offset, for PROBE_S at most; return the bytes it moved."""
    began, moved = time.perf_counter(), 0
    while moved < nbytes and time.perf_counter() - began < PROBE_S:
        moved += step(moved)
    return moved


def _holes(fd: int) -> Finding:
    try:
        RealDisk().punch(fd, 0, mmap.PAGESIZE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return note(
            "holes",
            "cannot be punched here: space is freed only when whole segments are empty",
            "put file.path on ext4 or xfs, or lower file.segment",
        )
    return ok("holes", "can be punched")


@contextmanager
def _nameless_file(directory: Path) -> Iterator[int]:
    """Open a file that is gone when it is closed, even by kill -9."""
    fd, name = tempfile.mkstemp(prefix=".kvstore-doctor-", dir=directory)
    try:
        os.unlink(name)
        yield fd
    finally:
        os.close(fd)


def _file_system(path: Path) -> str:
    """Return the type of the file system that `path` is on, as mount names it."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return "a file system that is not in mountinfo"
