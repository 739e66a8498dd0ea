"""A disk in memory that keeps only what was synced: the adversary of everything durable.

A `Platter` is the medium, a `SimDisk` one process's view of it. When the power goes, every page
written since the last fdatasync of its file ends up new, old or torn between sectors, and every
page punched out is a hole or as it was, each by its own toss of a coin; a file's length stops
anywhere between the two; names created or removed since the last sync of the directory are there
or not.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.format.frame import FrameKind
from kvstore.model.block import PAGE_NBYTES
from kvstore.tier.file import Sizes

SECTOR_NBYTES = 512
FRAME_MAGIC = b"KVSFRAME"


@dataclass(slots=True, eq=False)
class File:
    """An inode. `before`: what pages changed since the last fdatasync held when it was made."""

    pages: dict[int, bytes] = field(default_factory=dict)  # absent: a hole
    size: int = 0
    before: dict[int, bytes | None] = field(default_factory=dict)
    size_before: int = 0
    doomed: set[int] = field(default_factory=set)  # dropped by a failed fdatasync, never written

    def change(self, page: int, content: bytes | None) -> None:
        self.before.setdefault(page, self.pages.get(page))
        self.doomed.discard(page)
        if content is None:
            self.pages.pop(page, None)
        else:
            self.pages[page] = content

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return what is there, zeros in holes; less at the end."""
        end = min(offset + nbytes, self.size)
        pages = range(offset // PAGE_NBYTES, -(-end // PAGE_NBYTES))
        data = b"".join(self.pages.get(page, bytes(PAGE_NBYTES)) for page in pages)
        start = offset % PAGE_NBYTES
        return data[start : start + max(0, end - offset)]

    def sync(self) -> None:
        self.before = {page: self.before[page] for page in self.doomed}
        self.size_before = self.size

    def lose_power(self, draw: random.Random) -> None:
        for page, before in self.before.items():
            after = None if page in self.doomed and draw.random() < 0.8 else self.pages.get(page)
            punched = after is None and page not in self.doomed  # no sector of it was written
            content = draw.choice(
                [before, after] if punched else [before, after, _torn(before, after, draw)]
            )
            if content is None:
                self.pages.pop(page, None)
            else:
                self.pages[page] = content
        self.size = draw.choice([self.size_before, self.size, _between(self, draw)])
        self.pages = {p: c for p, c in self.pages.items() if p * PAGE_NBYTES < self.size}
        self.before, self.doomed, self.size_before = {}, set(), self.size


@dataclass(slots=True)
class Platter:
    """The medium: files by name, and the names the directory durably holds."""

    names: dict[str, File] = field(default_factory=dict)
    durable_names: dict[str, File] = field(default_factory=dict)

    def lose_power(self, draw: random.Random) -> None:
        for name in sorted(self.names.keys() | self.durable_names.keys()):
            if self.names.get(name) is not self.durable_names.get(name) and draw.random() < 0.5:
                self.names.pop(name, None)
                if name in self.durable_names:
                    self.names[name] = self.durable_names[name]
        for name in sorted(self.names):
            self.names[name].lose_power(draw)
        self.durable_names = dict(self.names)

    @property
    def dropped(self) -> bool:
        """Whether a failed sync left pages that are readable and will never be written."""
        return any(file.doomed for file in self.names.values())

    @property
    def tombstones(self) -> int:
        """How many there are in all files."""
        pages = (page for file in self.names.values() for page in file.pages.values())
        return sum(page[:8] == FRAME_MAGIC and page[10] != FrameKind.RUN for page in pages)

    def rot(self, draw: random.Random) -> tuple[str, int] | None:
        """Flip one bit anywhere but in a tombstone, which has no second copy. Returns the page."""
        pages = [
            (name, page)
            for name, file in sorted(self.names.items())
            for page in sorted(file.pages)
            if name.endswith(".segment")
            if file.pages[page][:8] != FRAME_MAGIC or file.pages[page][10] == FrameKind.RUN
        ]
        if not pages:
            return None
        name, page = draw.choice(pages)
        content = bytearray(self.names[name].pages[page])
        content[draw.randrange(PAGE_NBYTES)] ^= 1 << draw.randrange(8)
        self.names[name].pages[page] = bytes(content)
        return name, page


class SimDisk:
    """One process's descriptors. `failing`: the chance that a write or sync is refused.

    away: not mounted. sick: reads are refused.
    """

    def __init__(self, platter: Platter, draw: random.Random) -> None:
        self.dead = False
        self.failing = 0.0
        self.away = False
        self.sick = False
        self.faults = 0
        self._platter = platter
        self._draw = draw
        self._opened: dict[int, File] = {}
        self._next_fd = 3

    def make_directory(self, path: Path) -> None:
        self._alive()

    def lock(self, path: Path) -> int:
        return self._open(path, create=path.name not in self._platter.names)

    def names(self, path: Path) -> list[str]:
        if self.away:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._alive()
        return list(self._platter.names)

    def open(
        self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False
    ) -> int:
        if create and path.name in self._platter.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        return self._open(path, create=create)

    def close(self, fd: int) -> None:
        self._opened.pop(fd, None)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        file, data = self._file(fd), b"".join(buffers)
        assert offset % PAGE_NBYTES == len(data) % PAGE_NBYTES == 0, "O_DIRECT needs whole pages"
        if self._fails():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for start in range(0, len(data), PAGE_NBYTES):
            file.change((offset + start) // PAGE_NBYTES, data[start : start + PAGE_NBYTES])
        file.size = max(file.size, offset + len(data))
        return len(data)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        file, at = self._file(fd), offset
        if self.sick:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for buffer in buffers:
            filled = 0
            while filled < len(buffer) and at < file.size:
                page, start = divmod(at, PAGE_NBYTES)
                content = file.pages.get(page, bytes(PAGE_NBYTES))
                piece = content[start : start + min(len(buffer) - filled, file.size - at)]
                buffer[filled : filled + len(piece)] = piece
                filled += len(piece)
                at += len(piece)
        return at - offset

    def fdatasync(self, fd: int) -> None:
        file = self._file(fd)
        if self._fails():  # as Linux does: the pages stay readable, and are never written
            file.doomed |= file.before.keys()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file.sync()

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        file = self._file(fd)
        for page in range(offset // PAGE_NBYTES, (offset + nbytes) // PAGE_NBYTES):
            if page in file.pages:
                file.change(page, None)

    def next_data(self, fd: int, offset: int) -> int | None:
        first = offset // PAGE_NBYTES
        page = min((page for page in self._file(fd).pages if page >= first), default=None)
        return None if page is None else max(offset, page * PAGE_NBYTES)

    def next_hole(self, fd: int, offset: int) -> int:
        file, page = self._file(fd), offset // PAGE_NBYTES
        while page in file.pages:
            page += 1
        return min(max(offset, page * PAGE_NBYTES), file.size)

    def sizes(self, fd: int) -> Sizes:
        file = self._file(fd)
        return Sizes(file.size, len(file.pages) * PAGE_NBYTES)

    def unlink(self, path: Path) -> None:
        self._alive()
        if self._platter.names.pop(path.name, None) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def free_nbytes(self, path: Path) -> int:
        self._alive()
        return 1 << 60

    def sync_directory(self, path: Path) -> None:
        self._alive()
        self._platter.durable_names = dict(self._platter.names)

    def _alive(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the process is dead")
        if self.away:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

    def _fails(self) -> bool:
        fails = self._draw.random() < self.failing
        self.faults += fails
        return fails

    def _open(self, path: Path, *, create: bool) -> int:
        self._alive()
        names = self._platter.names
        if create:
            names[path.name] = File()
        if path.name not in names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._next_fd += 1
        self._opened[self._next_fd] = names[path.name]
        return self._next_fd

    def _file(self, fd: int) -> File:
        self._alive()
        return self._opened[fd]


def _torn(before: bytes | None, after: bytes | None, draw: random.Random) -> bytes:
    sides = [content or bytes(PAGE_NBYTES) for content in (before, after)]
    return b"".join(
        draw.choice(sides)[start : start + SECTOR_NBYTES]
        for start in range(0, PAGE_NBYTES, SECTOR_NBYTES)
    )


def _between(file: File, draw: random.Random) -> int:
    low, high = sorted((file.size_before, file.size))
    return draw.randint(low // PAGE_NBYTES, high // PAGE_NBYTES) * PAGE_NBYTES
