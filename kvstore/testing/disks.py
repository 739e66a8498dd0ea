"""Disks that fail on purpose, for tests of what is built on the file tier."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.model.block import PAGE_NBYTES
from kvstore.tier.file import RealDisk


class FaultyDisk(RealDisk):
    """A real disk on which `fault` may raise: it gets the name of the call before it is made.

    budget_nbytes: bytes that can still be written; None: no limit. A write beyond it is cut short,
    the next one fails with ENOSPC, as on a real file system.
    free: what the disk says it has left; None: what it really has.
    syncs: False only keeps count of what is durable, which is much faster.
    before: the disk that the killed process used: what it left unsynced still is.
    kill: what the death of a process does to its descriptors; locks fall, files stay as they are.
    lose_power: a kill, and of the pages that no fdatasync covered some were never written; files
    that no directory sync covered may be missing.
    """

    def __init__(self, *, syncs: bool = True, before: FaultyDisk | None = None) -> None:
        self.syncs = syncs
        self.fault: Callable[[str], None] | None = None
        self.budget_nbytes: int | None = None
        self.free: int | None = None
        self.opened: dict[int, Path] = {}
        # Offsets of pages, and files created since their directory was synced.
        self.unsynced: dict[Path, set[int]] = before.unsynced if before else {}
        self.unnamed: set[Path] = before.unnamed if before else set()
        self.dead = False

    def kill(self) -> None:
        self.dead = True
        while self.opened:  # threads of the tier open and close beside this
            fd, _ = self.opened.popitem()
            os.close(fd)

    def lose_power(self, draw: random.Random) -> None:
        self.kill()
        for path, offsets in self.unsynced.items():
            with path.open("r+b") as file:
                for offset in sorted(offsets):
                    if draw.random() < 0.5:
                        file.seek(offset)
                        file.write(bytes(PAGE_NBYTES))
        for path in sorted(self.unnamed):
            if draw.random() < 0.5:
                path.unlink()
        self.unsynced, self.unnamed = {}, set()

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        lost = range(offset, offset + written, PAGE_NBYTES)
        self.unsynced.setdefault(self.opened[fd], set()).update(lost)
        return written

    def _before(self, call: str) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the process is dead")
        if self.fault is not None:
            self.fault(call)

    def lock(self, path: Path) -> int:
        self._before("lock")
        fd = super().lock(path)
        self.opened[fd] = path
        return fd

    def open(
        self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False
    ) -> int:
        self._before("open_direct" if direct else "open")
        fd = super().open(path, write=write, create=create, direct=direct)
        self.opened[fd] = path
        if create:
            self.unnamed.add(path)
        return fd

    def close(self, fd: int) -> None:
        # Not after `kill`: the number may be somebody else's by now.
        if self.opened.pop(fd, None) is not None:
            super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("pwritev")
        if self.budget_nbytes is None:
            return self._write(fd, buffers, offset)
        if self.budget_nbytes < 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        page = buffers[0][: self.budget_nbytes // 4096 * 4096]
        written = self._write(fd, [page], offset)
        self.budget_nbytes -= written
        return written

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("preadv")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._before("fdatasync")
        covered = set(self.unsynced.get(self.opened[fd], ()))
        if self.syncs:
            super().fdatasync(fd)
        self.unsynced.get(self.opened[fd], set()).difference_update(covered)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        self._before("punch")
        super().punch(fd, offset, nbytes)

    def unlink(self, path: Path) -> None:
        self._before("unlink")
        super().unlink(path)
        self.unsynced.pop(path, None)
        self.unnamed.discard(path)

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory")
        if self.syncs:
            super().sync_directory(path)
        self.unnamed = {file for file in self.unnamed if file.parent != path}

    def names(self, path: Path) -> list[str]:
        self._before("names")
        return super().names(path)

    def free_nbytes(self, path: Path) -> int:
        self._before("free_nbytes")
        left = (self.free, self.budget_nbytes, super().free_nbytes(path))
        return min(nbytes for nbytes in left if nbytes is not None)


def failing(call: str, code: int) -> Callable[[str], None]:
    """Return a fault: every `call` raises OSError with `code`."""

    def fault(made: str) -> None:
        if made == call:
            raise OSError(code, os.strerror(code))

    return fault
