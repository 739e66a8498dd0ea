"""A small value that is replaced as a whole: two files, of which the older is written anew.

    NAME.a, NAME.b:  magic | u64 number | u64 bytes | u64 XXH3-64 of the bytes | bytes | zeros

A crash leaves the other one. A torn or rotten file counts as none.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.model.block import padded
from kvstore.model.checksum import checksum
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import disk_errors

_HEADER = struct.Struct("<8sQQQ")


class Twins(NamedTuple):
    """Which value. nbytes_max: larger ones are not read. padded: files of whole pages."""

    what: str
    name: str
    magic: bytes
    nbytes_max: int
    padded: bool = False

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.name}.a", f"{self.name}.b"


class Value(NamedTuple):
    """number: the higher one is the newer one; 0: there is none."""

    number: int
    data: bytes


def read_twins(disk: Disk, path: Path, twins: Twins) -> Value:
    """Return the newest value in a directory that is whole. Raises DiskFailed."""
    with disk_errors(f"read the {twins.what} in {path}"):
        return max(_read(disk, path / name, twins) for name in twins.names)


def write_twins(disk: Disk, path: Path, twins: Twins, data: bytes) -> None:
    """Replace the value, and make it durable. Raises DiskFull or DiskFailed."""
    with disk_errors(f"write the {twins.what} in {path}"):
        found = [(_read(disk, path / name, twins), name) for name in twins.names]
        (newest, _), (_, oldest) = max(found), min(found)
        if oldest in disk.names(path):
            disk.unlink(path / oldest)
        whole = _HEADER.pack(twins.magic, newest.number + 1, len(data), checksum(data)) + data
        if twins.padded:
            whole = whole.ljust(padded(len(whole)), b"\0")
        fd = disk.open(path / oldest, write=True, create=True)
        try:
            _write(disk, fd, memoryview(whole))
        finally:
            disk.close(fd)
        disk.sync_directory(path)


def destroy_twins(disk: Disk, path: Path, twins: Twins) -> None:
    """Overwrite both files with zeros, durably, then remove them. Raises DiskFull, DiskFailed."""
    with disk_errors(f"destroy the {twins.what} in {path}"):
        for name in twins.names:
            with suppress(FileNotFoundError):
                fd = disk.open(path / name, write=True)
                try:
                    _write(disk, fd, memoryview(bytes(disk.sizes(fd).nbytes)))
                finally:
                    disk.close(fd)
                disk.unlink(path / name)
        disk.sync_directory(path)


def _write(disk: Disk, fd: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += disk.pwritev(fd, [data[at:]], at)
    disk.fdatasync(fd)


def _read(disk: Disk, file: Path, twins: Twins) -> Value:
    nothing = Value(0, b"")
    try:
        fd = disk.open(file)
    except FileNotFoundError:
        return nothing
    try:
        nbytes = min(disk.sizes(fd).nbytes, padded(_HEADER.size + twins.nbytes_max))
        buffer = memoryview(bytearray(nbytes))
        if nbytes < _HEADER.size or disk.preadv(fd, [buffer], 0) != nbytes:
            return nothing
    finally:
        disk.close(fd)
    magic, number, length, value = _HEADER.unpack_from(buffer)
    data = bytes(buffer[_HEADER.size :])
    if twins.padded:
        data = data[:length]
    if magic != twins.magic or length != len(data) or checksum(data) != value:
        return nothing
    return Value(number, data)
