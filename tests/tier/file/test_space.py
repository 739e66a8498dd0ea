from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import FileTier
from tests.tier.file.frames import (
    MIB,
    expected,
    killed,
    live,
    opened,
    physical_nbytes,
    put,
    run,
    segments,
    tombstone,
)


def test_physical_bytes_are_what_the_file_system_says(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            extents = [await put(tier, n, range(n, n + 8)) for n in range(1, 60)]
            await tier.upkeep.settle()
            assert tier.frames.physical_nbytes == physical_nbytes(tmp_path) > 59 * 8 * 9000
            for extent in extents[::3]:
                tier.frames.free(extent)
            await tier.upkeep.settle()
            assert tier.frames.physical_nbytes == physical_nbytes(tmp_path)
            assert tier.space.freeing_nbytes == 0
        assert tier.frames.physical_nbytes == physical_nbytes(tmp_path)
        async with opened(tmp_path) as (tier, _):
            await tier.upkeep.settle()
            assert tier.frames.physical_nbytes == physical_nbytes(tmp_path)

    asyncio.run(main())


def test_the_cap_holds_on_disk_under_churn_to_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        capacity = 3 * MIB
        async with opened(tmp_path, capacity_bytes=capacity, segment_nbytes=MIB // 2) as (tier, _):
            kept = []
            for sequence in range(1, 300):
                header, payload = run(sequence, [sequence], nbytes=1000 * (sequence % 90 + 1))
                while (extent := tier.frames.allocate(header.nbytes)) is None:
                    tier.frames.free(kept.pop(0))
                    await tier.upkeep.settle()
                await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
                kept.append(extent)
                assert physical_nbytes(tmp_path) <= capacity
        assert MIB < physical_nbytes(tmp_path) <= capacity

    asyncio.run(main())


def test_a_smaller_cap_after_a_restart_is_reached_by_freeing(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            for sequence in range(1, 30):
                await put(tier, sequence, [sequence], nbytes=100_000)
        async with opened(tmp_path, capacity_bytes=MIB) as (tier, recovered):
            assert len(recovered.frames) == 29
            assert tier.frames.physical_nbytes > tier.frames.capacity_bytes
            assert tier.space.available_nbytes < 0
            for record in recovered.frames:
                if tier.frames.allocate(100_000) is not None:
                    break
                tier.frames.free(record.location)
                await tier.upkeep.settle()
            else:
                pytest.fail("freeing everything made no room")
            assert tier.frames.physical_nbytes <= tier.frames.capacity_bytes

    asyncio.run(main())


def test_a_tombstone_finds_room_in_a_full_tier_within_the_cap(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, capacity_bytes=MIB) as (tier, _):
            sequence = 1
            while tier.frames.allocate(50_000) is not None:
                sequence += 1
            await tier.frames.write_tombstone(tombstone(sequence, "a"))
            assert tier.frames.physical_nbytes <= tier.frames.capacity_bytes
            for n in range(40):  # beyond the reserve: a delete is more important than the cap
                await tier.frames.write_tombstone(tombstone(sequence + n, "a"))

    asyncio.run(main())


def test_a_dead_segment_is_unlinked(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            extents = [await put(tier, n, [n], nbytes=300_000) for n in range(1, 8)]
            assert len(segments(tmp_path)) == 3
            for extent in extents[:3]:
                tier.frames.free(extent)
            await tier.upkeep.settle()
            assert len(segments(tmp_path)) == 2

    asyncio.run(main())


@pytest.mark.parametrize("punches", [True, False])
def test_a_tombstone_stays_while_a_run_it_kills_may_exist(tmp_path: Path, punches: bool) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        if not punches:
            disk.fault = failing("punch", errno.EOPNOTSUPP)
        async with opened(tmp_path, disk=disk) as (tier, _):
            old = await put(tier, 1, "ab", nbytes=400_000)
            kept = await put(tier, 2, "c", nbytes=100_000)
            await put(tier, 3, "d", nbytes=400_000)  # the second segment
            await tier.frames.write_tombstone(tombstone(4, "ab"))
            newer = [await put(tier, 5 + n, [n], nbytes=400_000) for n in range(4)]
            tier.frames.free(old)
            await tier.upkeep.settle()
            second = segments(tmp_path)[1]
        async with opened(tmp_path, disk=disk) as (tier, recovered):
            frames = {record.header.sequence: record.location for record in recovered.frames}
            assert set(frames) == {2, 3, 5, 6, 7, 8}
            assert newer[0] == frames[5]
            for sequence in (3, 5):  # all that shares the tombstone's segment
                tier.frames.free(frames[sequence])
            await tier.upkeep.settle()
            assert second.exists()  # the first segment still could bring "ab" back
            tier.frames.free(frames[2])
            await tier.upkeep.settle()
            assert not second.exists()
            assert kept == frames[2]
        async with opened(tmp_path, disk=disk) as (_, recovered):
            assert live(recovered) == expected({1: 6, 2: 7, 3: 8})

    asyncio.run(main())


def test_without_hole_punching_space_comes_back_by_segments(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        disk.fault = failing("punch", errno.EOPNOTSUPP)
        async with opened(tmp_path, capacity_bytes=4 * MIB, disk=disk) as (tier, _):
            kept = []
            for sequence in range(1, 60):
                header, payload = run(sequence, [sequence], nbytes=200_000)
                while (extent := tier.frames.allocate(header.nbytes)) is None:
                    tier.frames.free(kept.pop(0))
                    await tier.upkeep.settle()
                await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
                kept.append(extent)
                assert physical_nbytes(tmp_path) <= tier.frames.capacity_bytes

    asyncio.run(main())


def test_a_frame_may_be_smaller_than_its_extent(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            for sequence in (1, 2):
                header, payload = run(sequence, [sequence])
                extent = tier.frames.allocate(400_000)
                assert extent is not None
                await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
            await put(tier, 3, [3])
            assert tier.frames.physical_nbytes < 100_000
        async with opened(tmp_path) as (_, recovered):
            assert live(recovered) == expected({1: 1, 2: 2, 3: 3})

    asyncio.run(main())


def test_the_largest_frame_fits_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        for number, capacity in enumerate((MIB, 8 * MIB)):
            async with opened(tmp_path / str(number), capacity_bytes=capacity) as (tier, _):
                largest = tier.space.frame_nbytes_max
                await put(tier, 1, "a", nbytes=largest - 4096)
                with pytest.raises(InvalidRequest):
                    tier.frames.allocate(largest + 1)
            assert physical_nbytes(tmp_path) <= capacity

    asyncio.run(main())


def test_misuse_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            header, payload = run(1, "a")
            extent = tier.frames.allocate(header.nbytes)
            assert extent is not None
            with pytest.raises(InvalidRequest, match="encode"):
                await tier.frames.write(extent, payload)
            with pytest.raises(InvalidRequest, match="write_tombstone"):
                tier.frames.encode(extent, tombstone(1, "a"))
            with pytest.raises(InvalidRequest, match="no tombstone"):
                await tier.frames.write_tombstone(header)
            with pytest.raises(InvalidRequest, match="a frame of"):
                tier.frames.encode(extent, run(1, "abc")[0])
            page = tier.frames.encode(extent, header)
            with pytest.raises(InvalidRequest, match="first buffer"):
                await tier.frames.write(extent, payload)
            with pytest.raises(InvalidRequest, match="do not hold"):
                await tier.frames.write(extent, [page])
            with pytest.raises(InvalidRequest, match="not written"):
                await tier.frames.read(extent, 0, [payload[0]])
            await tier.frames.write(extent, [page, *payload])
            with pytest.raises(InvalidRequest, match="once"):
                await tier.frames.write(extent, [page, *payload])

    asyncio.run(main())


@pytest.mark.parametrize("settings", [{"capacity_bytes": 1000}, {"segment_nbytes": 100_000}])
def test_impossible_settings_are_config_errors(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        FileTier(tmp_path, **{"capacity_bytes": MIB, **settings})
