"""A few MiB that a directory keeps for the next start, beside its frames and outside the cap.

    NOTE.a, NOTE.b:  magic | u64 number | u64 bytes | u64 XXH3-64 of the bytes | bytes

The older of the two is written anew, so a crash leaves the other one. A torn or rotten note counts
as none: a start can do without.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.model.checksum import checksum
from kvstore.tier.file.devices.admission import Admission
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import DiskFailed, disk_errors

NOTE_NBYTES_MAX = 16 << 20
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"kvnote\0\1"  # the last byte is the version
_NAMES = ("NOTE.a", "NOTE.b")


class Note(NamedTuple):
    """number: the higher one is the newer one; 0: there is none."""

    number: int
    data: bytes


class Notes:
    """The notes on all devices. The newest one counts."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def read(self) -> bytes:
        """Return the newest note that a directory in use has, nothing if there is none."""
        newest = Note(0, b"")
        for mount in self._admission.mounts:
            with suppress(DiskFailed):
                newest = max(newest, await mount.on_disk(read_note))
        return newest.data

    async def write(self, data: bytes) -> None:
        """Write a few MiB for the next start, in one directory. Raises DiskFull, DiskFailed."""
        for mount in self._admission.writable[:1]:
            await mount.on_disk(partial(write_note, data=data))


def read_note(disk: Disk, path: Path) -> Note:
    """Return the newest note of a directory that is whole. Raises DiskFailed."""
    with disk_errors(f"read the note in {path}"):
        return max(_read(disk, path / name) for name in _NAMES)


def write_note(disk: Disk, path: Path, data: bytes) -> None:
    """Replace the note, and make it durable. Raises DiskFull or DiskFailed."""
    if len(data) > NOTE_NBYTES_MAX:
        return
    with disk_errors(f"write the note in {path}"):
        found = [(_read(disk, path / name), name) for name in _NAMES]
        (newest, _), (_, oldest) = max(found), min(found)
        if oldest in disk.names(path):
            disk.unlink(path / oldest)
        header = _HEADER.pack(_MAGIC, newest.number + 1, len(data), checksum(data))
        fd = disk.open(path / oldest, write=True, create=True)
        try:
            whole = memoryview(header + data)
            at = 0
            while at < len(whole):
                at += disk.pwritev(fd, [whole[at:]], at)
            disk.fdatasync(fd)
        finally:
            disk.close(fd)
        disk.sync_directory(path)


def _read(disk: Disk, file: Path) -> Note:
    nothing = Note(0, b"")
    try:
        fd = disk.open(file)
    except FileNotFoundError:
        return nothing
    try:
        nbytes = min(disk.sizes(fd).nbytes, _HEADER.size + NOTE_NBYTES_MAX)
        buffer = memoryview(bytearray(nbytes))
        if nbytes < _HEADER.size or disk.preadv(fd, [buffer], 0) != nbytes:
            return nothing
    finally:
        disk.close(fd)
    magic, number, length, value = _HEADER.unpack_from(buffer)
    data = bytes(buffer[_HEADER.size :])
    if magic != _MAGIC or length != len(data) or checksum(data) != value:
        return nothing
    return Note(number, data)
