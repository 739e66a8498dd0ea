"""Reads in several parts, each by a thread of its own, and what is done with the bytes there."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from kvstore.model.block import PAGE_NBYTES
from kvstore.testing.disks import FaultyDisk
from kvstore.testing.tier import pages
from kvstore.tier.base import PART_NBYTES
from kvstore.tier.file import DiskFailed
from tests.tier.file.frames import MIB, opened, put, run

NBYTES = 3 * PART_NBYTES + 5 * PAGE_NBYTES


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (1, [NBYTES]),
        (2, [2 * PART_NBYTES, NBYTES - 2 * PART_NBYTES]),
        (4, [PART_NBYTES] * 3 + [5 * PAGE_NBYTES]),
        (100, [PART_NBYTES] * 3 + [5 * PAGE_NBYTES]),
    ],
)
def test_each_part_is_told_when_it_is_there(tmp_path: Path, parts: int, sizes: list[int]) -> None:
    _, (payload,) = run(1, ["a"], nbytes=NBYTES)
    together = threading.Barrier(len(sizes), timeout=10)
    told: list[slice] = []

    async def main() -> None:
        async with opened(tmp_path, segment_nbytes=4 * MIB) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=NBYTES)
            target = pages(NBYTES)

            def then(part: slice) -> None:
                assert target[part] == payload[part]
                together.wait()  # only if each has a thread of its own
                told.append(part)

            await tier.frames.read(extent, PAGE_NBYTES, [target], then, parts)
            assert target == payload

    asyncio.run(main())
    told.sort(key=lambda part: part.start)
    assert [part.stop - part.start for part in told] == sizes
    assert [part.start for part in told] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_small_reads_and_those_of_several_targets_stay_whole(tmp_path: Path) -> None:
    told: list[slice] = []

    async def main() -> None:
        async with opened(tmp_path, segment_nbytes=4 * MIB) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=NBYTES)
            await tier.frames.read(extent, PAGE_NBYTES, [pages(2 * PAGE_NBYTES)], told.append, 4)
            several = [pages(PART_NBYTES), pages(2 * PART_NBYTES)]
            await tier.frames.read(extent, PAGE_NBYTES, several, told.append, 4)

    asyncio.run(main())
    assert told == [slice(0, 2 * PAGE_NBYTES), slice(0, 3 * PART_NBYTES)]


def test_a_part_that_fails_is_told_when_the_others_have_ended(tmp_path: Path) -> None:
    calls: list[str] = []
    slow = threading.Event()
    ended: list[slice] = []

    def fault(call: str) -> None:
        if call == "preadv":
            calls.append(call)
            if len(calls) == 1:
                raise OSError(errno.EIO, "the first one")
            assert slow.wait(10)

    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk, segment_nbytes=4 * MIB) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=NBYTES)
            disk.fault = fault
            reading = asyncio.create_task(
                tier.frames.read(extent, PAGE_NBYTES, [pages(NBYTES)], ended.append, 4)
            )
            await asyncio.wait([reading], timeout=0.1)
            assert not reading.done()
            slow.set()
            with pytest.raises(DiskFailed, match="the first one"):
                await reading
            assert len(ended) == 3
            disk.fault = None

    asyncio.run(main())


def test_a_cancelled_read_ends_with_its_last_thread(tmp_path: Path) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def fault(call: str) -> None:
        if call == "preadv":
            begun.release()
            assert go_on.wait(10)

    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk, segment_nbytes=4 * MIB) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=NBYTES)
            disk.fault = fault
            target = pages(NBYTES)
            reading = asyncio.create_task(tier.frames.read(extent, PAGE_NBYTES, [target], None, 2))
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=10)
            for _ in range(2):
                reading.cancel()
                await asyncio.wait([reading], timeout=0.02)
                assert not reading.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
            disk.fault = None

    asyncio.run(main())


def test_what_is_done_with_the_bytes_may_fail(tmp_path: Path) -> None:
    def then(part: slice) -> None:
        raise ValueError("not these")

    async def main() -> None:
        async with opened(tmp_path, segment_nbytes=4 * MIB) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=NBYTES)
            with pytest.raises(ValueError, match="not these"):
                await tier.frames.read(extent, PAGE_NBYTES, [pages(NBYTES)], then, 4)
            await tier.frames.read(extent, PAGE_NBYTES, [pages(NBYTES)])

    asyncio.run(main())
