"""A few MiB that a directory keeps for the next start, beside its frames and outside the cap: what
policies have learned; the history of the node, and its last minutes, which are written often.

A torn, rotten or forged note counts as none: a start can do without. Where the tier is encrypted,
the note is, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstore.tier.file.devices.admission import Admission
from kvstore.tier.file.devices.device import Mount
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import DiskFailed
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.twin_files import Twins, Value, read_twins, write_twins

NOTE_NBYTES_MAX = 16 << 20
NOTE = Twins("note", "NOTE", b"kvnote\0\1", NOTE_NBYTES_MAX, padded=True)  # last byte: version
HISTORY_NBYTES_MAX = 2 << 20
HISTORY = Twins("history", "HISTORY", b"kvhist\0\1", HISTORY_NBYTES_MAX, padded=True)
RECENT = Twins("recent history", "RECENT", b"kvrcnt\0\1", HISTORY_NBYTES_MAX, padded=True)
NOTES = (NOTE, HISTORY, RECENT)


class Notes:
    """The notes of one kind on all devices. The newest one counts."""

    def __init__(self, admission: Admission, twins: Twins = NOTE) -> None:
        self._admission = admission
        self._twins = twins
        self._last: tuple[Mount, asyncio.Future[None]] | None = None

    async def read(self) -> bytes:
        """Return the newest note that a directory in use has, nothing if there is none."""
        newest = Value(0, b"")
        for mount in self._admission.mounts:
            with suppress(DiskFailed):
                read = partial(read_note, keys=mount.tier.keys, twins=self._twins)
                newest = max(newest, await mount.on_disk(read))
        return newest.data

    async def write(self, data: bytes | Callable[[], bytes]) -> None:
        """Write a few MiB for the next start, in one directory. data: or what returns them, on the
        directory's thread. Raises DiskFull, DiskFailed; also where the one before, which nobody
        waits for any more, is still being written."""
        for mount in self._admission.writable[:1]:
            if self._last is not None and self._last[0] is mount and not self._last[1].done():
                raise DiskFailed(f"the last {self._twins.what} is still being written")
            write = partial(write_note, data=data, keys=mount.tier.keys, twins=self._twins)
            writing = mount.begin(write)
            self._last = mount, writing
            await mount.answer_of(writing)


def read_note(
    disk: Disk, path: Path, keys: DirectoryKeys | None = None, twins: Twins = NOTE
) -> Value:
    """Return the newest note of a directory that is whole. Raises DiskFailed."""
    found = read_twins(disk, path, twins)
    if keys is None or not found.number:
        return found
    data = keys.open_note(found.data, _label(twins))
    return found._replace(data=data) if data is not None else Value(0, b"")


def write_note(
    disk: Disk,
    path: Path,
    data: bytes | Callable[[], bytes],
    keys: DirectoryKeys | None = None,
    twins: Twins = NOTE,
) -> None:
    """Replace the note, and make it durable. Raises DiskFull or DiskFailed."""
    data = data if isinstance(data, bytes) else data()
    if keys is not None:
        data = keys.seal_note(data, _label(twins))
    if len(data) <= twins.nbytes_max:
        write_twins(disk, path, twins, data)


def _label(twins: Twins) -> bytes:
    """Return what encrypted notes of a kind are bound to."""
    return twins.name.lower().encode()
