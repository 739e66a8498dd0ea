"""Take a directory into use: make it, lock it, learn what its file system supports."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import NamedTuple

from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import ConfigError
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import NO_SPACE, disk_errors
from kvstore.tier.file.pages import aligned_buffer, aligned_copy

LOCK_NAME = "LOCK"
PROBE_NAME = "PROBE"
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_log = logging.getLogger(__name__)


class Directory(NamedTuple):
    """A locked directory, and what its file system supports."""

    lock_fd: int
    direct: bool
    punches: bool


def take_directory(disk: Disk, path: Path, *, direct: bool) -> Directory:
    """Make, lock and probe `path`. Raises ConfigError that says what to do."""
    try:
        disk.make_directory(path)
        lock_fd = disk.lock(path / LOCK_NAME)
    except BlockingIOError as error:
        raise ConfigError(
            f"{path} is used by another kvstore daemon: stop it, or give this one its own path"
        ) from error
    except (NotADirectoryError, FileExistsError) as error:
        raise ConfigError(f"{path} is not a directory: name one, or a path that is free") from error
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        can_direct, punches = _probe(disk, path, direct=direct)
    except OSError as error:
        disk.close(lock_fd)
        raise _refusal(path, error) from error
    if direct and not can_direct:
        _log.warning("no O_DIRECT, reads and writes go through the page cache path=%s", path)
    if not punches:
        _log.warning("no hole punching, space comes back segment by segment path=%s", path)
    return Directory(lock_fd, can_direct, punches)


def _refusal(path: Path, error: OSError) -> ConfigError:
    if error.errno in _READ_ONLY:
        return ConfigError(
            f"{path} cannot be written ({error.strerror}): make it writable for this user, or "
            "name another path"
        )
    return ConfigError(f"{path} cannot be used ({error.strerror}): check the disk, or move it")


def _probe(disk: Disk, path: Path, *, direct: bool) -> tuple[bool, bool]:
    """Return whether O_DIRECT and hole punching work, by trying them on a scratch file."""
    probe = _scratch(disk, path)
    try:
        return direct and _can_direct(disk, probe), _can_punch(disk, probe)
    finally:
        disk.unlink(probe)


def try_out(disk: Disk, path: Path, *, direct: bool, room_nbytes: int) -> None:
    """Write a small file, sync it and read it again. Raises DiskFull, DiskFailed."""
    with disk_errors(f"try out {path}"):
        if disk.free_nbytes(path) < room_nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        probe = _scratch(disk, path)
        try:
            fd = disk.open(probe, write=True, direct=direct)
            try:
                page = aligned_copy(os.urandom(PAGE_NBYTES))
                found = aligned_buffer(PAGE_NBYTES)
                disk.pwritev(fd, [page], 0)
                disk.fdatasync(fd)
                if disk.preadv(fd, [found], 0) != PAGE_NBYTES or found != page:
                    raise OSError(errno.EIO, "it does not hold what was written")
            finally:
                disk.close(fd)
        finally:
            disk.unlink(probe)


def _scratch(disk: Disk, path: Path) -> Path:
    """Make the scratch file anew."""
    probe = path / PROBE_NAME
    try:
        disk.unlink(probe)
    except FileNotFoundError:
        pass  # the usual case: no earlier probe was interrupted
    disk.close(disk.open(probe, write=True, create=True))
    return probe


def _can_direct(disk: Disk, probe: Path) -> bool:
    try:
        fd = disk.open(probe, write=True, direct=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        page = aligned_buffer(PAGE_NBYTES)
        return disk.pwritev(fd, [page], 0) == disk.preadv(fd, [page], 0) == PAGE_NBYTES
    except OSError as error:
        if error.errno in NO_SPACE:
            return True  # the file opened; a full disk must not keep the tier from freeing space
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        disk.close(fd)


def _can_punch(disk: Disk, probe: Path) -> bool:
    fd = disk.open(probe, write=True)
    try:
        disk.punch(fd, 0, PAGE_NBYTES)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    finally:
        disk.close(fd)
    return True
