"""A tail without a footer is scanned: many small frames with one read, and what is unreadable alone
is missing. Scans take turns, and a disk that hangs keeps none of them from the others.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.model.block import PAGE_NBYTES
from kvstore.testing.disks import FaultyDisk
from kvstore.tier.file.recovery import AHEAD_NBYTES
from tests.tier.file.frames import MIB, SEALING, flip, killed, opened, put, segments, verify

WAIT_S = 20.0


class BadSector(FaultyDisk):
    """Refuses every read that comes by one place, once that is known. reads: those of files."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: int | None = None
        self.reads = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if self.bad is not None and offset <= self.bad < offset + nbytes:
            raise OSError(errno.EIO, "bad sector")
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("sealing", [None, SEALING])
def test_a_bad_sector_in_the_tail_costs_its_own_frame_alone(
    tmp_path: Path, sealing: object
) -> None:
    async def main() -> None:
        async with killed(tmp_path, sealing=sealing) as (tier, _):
            extents = [await put(tier, number, f"{number}") for number in range(1, 9)]
            await tier.durability.sync()
        disk = BadSector()
        disk.bad = extents[3].offset + PAGE_NBYTES + 17
        async with opened(tmp_path, sealing=sealing, disk=disk) as (tier, recovered):
            assert [record.header.sequence for record in recovered.frames] == [1, 2, 3, 5, 6, 7, 8]
            assert recovered.dropped_frames == 1
            disk.bad = None
            for record in recovered.frames:
                await verify(tier, record)

    asyncio.run(main())


def test_a_tail_of_small_frames_is_read_many_at_once(tmp_path: Path) -> None:
    frames = 40

    async def main() -> None:
        async with killed(tmp_path, segment_nbytes=8 * MIB, capacity_bytes=32 * MIB) as (tier, _):
            for number in range(frames):
                await put(tier, number + 1, [f"block {number}"])
            await tier.durability.sync()
        disk = BadSector()
        async with opened(tmp_path, disk=disk) as (_, recovered):
            assert len(recovered.frames) == frames
            assert disk.reads < frames / 2

    asyncio.run(main())


class HangingDisk(FaultyDisk):
    """Hangs in the first call of a kind that a scan makes, until `go_on`."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if sum(buffer.nbytes for buffer in buffers) >= AHEAD_NBYTES:
            self._hang("preadv")
        return super().preadv(fd, buffers, offset)

    def next_data(self, fd: int, offset: int) -> int | None:
        self._hang("next_data")
        return super().next_data(fd, offset)

    def _hang(self, call: str) -> None:
        if call == self._call and not self.go_on.is_set():
            self.hangs.set()
            self.go_on.wait(WAIT_S)


@pytest.mark.parametrize("call", ["preadv", "next_data"])
def test_a_disk_that_hangs_in_a_scan_holds_up_no_other(tmp_path: Path, call: str) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"

    async def fill(path: Path) -> None:
        async with killed(path) as (tier, _):
            extents = [await put(tier, number, f"{number}") for number in range(1, 4)]
            await tier.durability.sync()
        flip(segments(path)[0], extents[1].offset + 100)  # so that it is looked for the next one

    async def frames_of(path: Path, disk: FaultyDisk) -> int:
        async with opened(path, disk=disk) as (_, recovered):
            return len(recovered.frames)

    async def main() -> None:
        for path in (bad, good):
            await fill(path)
        disk = HangingDisk(call)
        first = asyncio.create_task(frames_of(bad, disk))
        try:
            assert await asyncio.to_thread(disk.hangs.wait, WAIT_S)
            async with asyncio.timeout(WAIT_S / 2):
                assert await frames_of(good, FaultyDisk()) == 2
            assert not first.done()
        finally:
            disk.go_on.set()
        assert await first == 2

    asyncio.run(main())
