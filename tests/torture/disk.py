"""A real disk under a real daemon, with faults that are steered from outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvstore.format.frame import FrameKind
from kvstore.model.block import PAGE_NBYTES
from kvstore.tier.file import RealDisk
from tests.torture.control import Steered, die

_KINDS = {b"KVSEGMNT": "create", b"KVSTRAIL": "seal"}


class SteeredDisk(RealDisk):
    """Each call first meets the rules that stand. number: its name in them."""

    def __init__(self, steered: Steered, number: int) -> None:
        self._meet = partial(steered.meet, disk=number)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._meet(_kind(buffers)) == "tear":
            super().pwritev(fd, _half(buffers), offset)
            die()
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._meet("read")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._meet("fdatasync")
        super().fdatasync(fd)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        self._meet("punch")
        super().punch(fd, offset, nbytes)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._meet("sync_directory")
        super().sync_directory(path)


def _kind(buffers: Sequence[memoryview]) -> str:
    """Tell what is being written from its first page, or, of a footer, from its last."""
    first, last = bytes(buffers[0][:11]), bytes(buffers[-1][-PAGE_NBYTES:][:8])
    if first[:8] == b"KVSFRAME":
        return "write" if first[10] == FrameKind.RUN else "tombstone"
    return _KINDS.get(last, "probe")


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the first half of the pages, at least one of them."""
    left = max(1, sum(map(len, buffers)) // PAGE_NBYTES // 2) * PAGE_NBYTES
    half = []
    for buffer in buffers:
        half.append(buffer[:left])
        left -= len(half[-1])
        if not left:
            break
    return half
