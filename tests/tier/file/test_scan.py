"""A tail without a footer is scanned: many small frames with one read, and what is unreadable alone
is missing.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.model.block import PAGE_NBYTES
from kvstore.testing.disks import FaultyDisk
from tests.tier.file.frames import MIB, SEALING, killed, opened, put, verify


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
