"""Reads of encrypted frames, block by block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvstore.format.frame import SegmentTag
from kvstore.model.block import PAGE_NBYTES
from kvstore.testing.tier import pages
from kvstore.tier.file import RealDisk
from kvstore.tier.file.sealed_io import Headers
from tests.tier.file.frames import MIB, SEALING, opened, put, run


class CountingDisk(RealDisk):
    """Notes how many bytes each read is of."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads.append(sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)


def test_blocks_of_a_frame_that_are_read_one_by_one_need_its_header_once(tmp_path: Path) -> None:
    disk, names, nbytes = CountingDisk(), "abcdefgh", 300_000

    async def main() -> None:
        fresh = opened(tmp_path, sealing=SEALING, segment_nbytes=16 * MIB)
        async with fresh as (tier, _):
            await put(tier, 1, names, nbytes=nbytes)
        async with opened(tmp_path, sealing=SEALING, segment_nbytes=16 * MIB, disk=disk) as (
            tier,
            recovered,
        ):
            (frame,) = recovered.frames
            _, payload = run(1, names, nbytes=nbytes)
            size = len(pages(nbytes))
            disk.reads.clear()
            for position in (5, 2, 7):
                target = pages(nbytes)
                await tier.frames.read(frame.location, PAGE_NBYTES + position * size, [target])
                assert target[:nbytes] == payload[position][:nbytes]
            assert disk.reads == [PAGE_NBYTES, size, size, size]
            disk.reads.clear()
            targets = [pages(nbytes) for _ in names[1:]]
            await asyncio.gather(
                *(
                    tier.frames.read(frame.location, PAGE_NBYTES + position * size, [target])
                    for position, target in enumerate(targets, 1)
                )
            )
            assert disk.reads == [size] * len(targets)

    asyncio.run(main())


def test_threads_that_read_blocks_of_one_frame_at_once_do_not_all_read_its_header() -> None:
    headers, tag = Headers(kept=2), SegmentTag(1, 2)
    with headers.coming(tag, 0) as first, headers.coming(tag, 0) as second:
        assert (first, second) == (True, False)
        with headers.coming(tag, PAGE_NBYTES) as other:
            assert other
    with headers.coming(tag, 0) as again:
        assert again
    header, _ = run(1, "a")
    for offset in range(3):
        headers.note(tag, offset, header)
    assert headers.get(tag, 0) is None  # no more than two are kept
    assert headers.get(tag, 2) is header
