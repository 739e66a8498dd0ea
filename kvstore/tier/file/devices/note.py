"""A few MiB that a directory keeps for the next start, beside its frames and outside the cap.

A torn, rotten or forged note counts as none: a start can do without. Where the tier is encrypted,
the note is, too.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstore.tier.file.devices.admission import Admission
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import DiskFailed
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.twin_files import Twins, Value, read_twins, write_twins

NOTE_NBYTES_MAX = 16 << 20
NOTE = Twins("note", "NOTE", b"kvnote\0\1", NOTE_NBYTES_MAX)  # the last byte is the version
_LABEL = b"note"


class Notes:
    """The notes on all devices. The newest one counts."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def read(self) -> bytes:
        """Return the newest note that a directory in use has, nothing if there is none."""
        newest = Value(0, b"")
        for mount in self._admission.mounts:
            with suppress(DiskFailed):
                newest = max(newest, await mount.on_disk(partial(read_note, keys=mount.tier.keys)))
        return newest.data

    async def write(self, data: bytes) -> None:
        """Write a few MiB for the next start, in one directory. Raises DiskFull, DiskFailed."""
        for mount in self._admission.writable[:1]:
            await mount.on_disk(partial(write_note, data=data, keys=mount.tier.keys))


def read_note(disk: Disk, path: Path, keys: DirectoryKeys | None = None) -> Value:
    """Return the newest note of a directory that is whole. Raises DiskFailed."""
    found = read_twins(disk, path, NOTE)
    if keys is None or not found.number:
        return found
    data = keys.open_note(found.data, _LABEL)
    return found._replace(data=data) if data is not None else Value(0, b"")


def write_note(disk: Disk, path: Path, data: bytes, keys: DirectoryKeys | None = None) -> None:
    """Replace the note, and make it durable. Raises DiskFull or DiskFailed."""
    if keys is not None:
        data = keys.seal_note(data, _LABEL)
    if len(data) <= NOTE_NBYTES_MAX:
        write_twins(disk, path, NOTE, data)
