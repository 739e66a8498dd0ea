from __future__ import annotations

import asyncio
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.format.frame import encode_segment_header
from kvstore.format.frame.page import guard
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import ConfigError, CorruptBlock, Incompatible
from kvstore.testing.tier import pages
from kvstore.tier.file import FileTier
from kvstore.tier.file.disk import RealDisk
from kvstore.tier.file.segment_file import parse_segment_name
from tests.tier.file.frames import (
    MIB,
    OTHER,
    SEALING,
    expected,
    flip,
    killed,
    live,
    opened,
    put,
    run,
    segments,
    tombstone,
    verify,
)


async def recovered_names(path: Path, **settings: object) -> dict[object, int]:
    async with opened(path, **settings) as (tier, recovered):
        for record in recovered.frames:
            await verify(tier, record)
        return dict(live(recovered))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ending", [opened, killed])
def test_frames_come_back(tmp_path: Path, ending: object, direct: bool) -> None:
    async def main() -> None:
        async with ending(tmp_path, direct=direct) as (tier, recovered):  # type: ignore[operator]
            assert (recovered.frames, recovered.next_sequence) == ([], 1)
            for sequence in range(1, 30):
                await put(tier, sequence, [f"{sequence}-{i}" for i in range(16)])
            await tier.durability.sync()
        assert len(segments(tmp_path)) > 3
        async with opened(tmp_path, direct=direct) as (tier, recovered):
            assert recovered.next_sequence == 30
            assert recovered.dropped_frames == 0
            assert [record.header.sequence for record in recovered.frames] == list(range(1, 30))
            for record in recovered.frames:
                assert record.live == tuple(range(16))
                await verify(tier, record)

    asyncio.run(main())


@pytest.mark.parametrize("sealing", [None, SEALING])
@pytest.mark.parametrize("rotten", [None, 0, 3, 4, 10])
def test_every_block_of_a_large_frame_in_the_tail_is_verified(
    tmp_path: Path, sealing: object, rotten: int | None
) -> None:
    sizes = {"direct": False, "segment_nbytes": 8 * MIB, "capacity_bytes": 32 * MIB}

    async def main() -> None:
        async with killed(tmp_path, sealing=sealing, **sizes) as (tier, _):
            extent = await put(tier, 1, "abcdefghijk", nbytes=300_000)
            await tier.durability.sync()
        if rotten is not None:
            flip(segments(tmp_path)[0], extent.offset + PAGE_NBYTES + rotten * padded(300_000))
        async with opened(tmp_path, sealing=sealing, **sizes) as (tier, recovered):
            assert recovered.dropped_frames == (rotten is not None)
            for record in recovered.frames:
                await verify(tier, record)
            assert len(live(recovered)) == (11 if rotten is None else 0)

    asyncio.run(main())


def test_after_a_clean_close_no_payload_is_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            extent = await put(tier, 1, "abc")
        # Rot that a scan would drop; a footer keeps the frame, and its reader finds out.
        flip(segments(tmp_path)[0], extent.offset + PAGE_NBYTES)
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered) == expected({"a": 1, "b": 1, "c": 1})
            with pytest.raises(CorruptBlock):
                await verify(tier, recovered.frames[0])

    asyncio.run(main())


def test_a_killed_tail_is_sealed_by_the_next_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            extent = await put(tier, 1, "a")
        async with killed(tmp_path):
            pass
        flip(segments(tmp_path)[0], extent.offset + PAGE_NBYTES)
        async with opened(tmp_path) as (_, recovered):  # through the footer: not verified
            assert recovered.dropped_frames == 0
            assert live(recovered) == expected({"a": 1})

    asyncio.run(main())


@pytest.mark.parametrize("at", [0, 100, 4090, PAGE_NBYTES, 3 * PAGE_NBYTES + 17])
def test_a_rotten_frame_in_the_tail_is_dropped_and_the_older_one_serves(
    tmp_path: Path, at: int
) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            extent = await put(tier, 2, "bc")
            await put(tier, 3, "d")
            await tier.durability.sync()
        flip(segments(tmp_path)[0], extent.offset + at)
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered) == expected({"a": 1, "b": 1, "d": 3})
            assert recovered.dropped_frames == (1 if at else 0)  # without magic it is no frame
            assert recovered.next_sequence == 4
            for record in recovered.frames:
                await verify(tier, record)
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1, "d": 3})

    asyncio.run(main())


@pytest.mark.parametrize("lost_nbytes", [1, 4000, 4096, 9000, 16_000, 20_480 - 4096])
def test_a_torn_tail_is_dropped_and_what_precedes_it_serves(
    tmp_path: Path, lost_nbytes: int
) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            extent = await put(tier, 2, "b", nbytes=16_384)
            assert extent.nbytes == 20_480
            await tier.durability.sync()
        path = segments(tmp_path)[0]
        os.truncate(path, path.stat().st_size - lost_nbytes)
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1})
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1})

    asyncio.run(main())


def test_a_write_that_never_reached_its_payload_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "a")
            extent = await put(tier, 2, "ab")
            await put(tier, 3, "c")
        with segments(tmp_path)[0].open("r+b") as file:
            file.seek(extent.offset + PAGE_NBYTES)
            file.write(bytes(extent.nbytes - PAGE_NBYTES))
        assert await recovered_names(tmp_path) == expected({"a": 1, "c": 3})

    asyncio.run(main())


@pytest.mark.parametrize("from_end", [1, PAGE_NBYTES, PAGE_NBYTES + 4000, 2 * PAGE_NBYTES])
def test_a_damaged_footer_falls_back_to_a_scan(tmp_path: Path, from_end: int) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            gone = await put(tier, 2, "cd")
            tier.frames.free(gone)
        path = segments(tmp_path)[0]
        flip(path, path.stat().st_size - from_end)
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1})
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1})  # sealed anew

    asyncio.run(main())


@pytest.mark.parametrize("ending", [opened, killed])
def test_a_damaged_segment_header_costs_nothing(tmp_path: Path, ending: object) -> None:
    async def main() -> None:
        async with ending(tmp_path) as (tier, _):  # type: ignore[operator]
            await put(tier, 1, "ab")
        flip(segments(tmp_path)[0], 20)
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1})

    asyncio.run(main())


@pytest.mark.parametrize("ending", [opened, killed])
def test_freed_frames_stay_away(tmp_path: Path, ending: object) -> None:
    async def main() -> None:
        async with ending(tmp_path) as (tier, _):  # type: ignore[operator]
            extents = [await put(tier, n, [n]) for n in range(1, 80)]
            for extent in extents[::2]:
                tier.frames.free(extent)
            await tier.upkeep.settle()
        left = {n: n for n in range(2, 80, 2)}
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered) == expected(left)
            for record in recovered.frames[::2]:  # freed in a sealed segment
                tier.frames.free(record.location)
        names = sorted(left)[1::2]
        assert await recovered_names(tmp_path) == expected({n: n for n in names})

    asyncio.run(main())


@pytest.mark.parametrize("page", [1, 2, 3])
def test_a_frame_freed_in_part_does_not_hide_an_older_copy(tmp_path: Path, page: int) -> None:
    """A power cut may keep the header page of a frame that was being punched out."""

    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            freed = await put(tier, 2, "a")
        file = segments(tmp_path)[freed.segment - 1]
        disk = RealDisk()
        fd = disk.open(file, write=True)
        disk.punch(fd, freed.offset + page * PAGE_NBYTES, PAGE_NBYTES)
        disk.close(fd)
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 1})

    asyncio.run(main())


def test_zeros_that_a_file_system_does_not_store_are_still_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            header, _ = run(1, "a", nbytes=3 * PAGE_NBYTES)
            zeros = pages(3 * PAGE_NBYTES)
            zeros[:] = bytes(len(zeros))
            value = checksum(zeros)
            block = header.blocks[0]._replace(raw_checksum=value, stored_checksum=value)
            header = replace(header, blocks=(block,))
            extent = tier.frames.allocate(header.nbytes)
            assert extent is not None
            await tier.frames.write(extent, [tier.frames.encode(extent, header), zeros])
        disk = RealDisk()
        fd = disk.open(segments(tmp_path)[0], write=True)
        disk.punch(fd, extent.offset + PAGE_NBYTES, 3 * PAGE_NBYTES)
        disk.close(fd)
        assert await recovered_names(tmp_path) == expected({"a": 1})

    asyncio.run(main())


@pytest.mark.parametrize("ending", [opened, killed])
def test_a_tombstone_beats_older_frames_and_spares_newer_ones(
    tmp_path: Path, ending: object
) -> None:
    async def main() -> None:
        async with ending(tmp_path) as (tier, _):  # type: ignore[operator]
            await put(tier, 1, "abc")
            await put(tier, 2, "xy", namespace=OTHER)
            await tier.frames.write_tombstone(tombstone(3, "ab"))
            await tier.frames.write_tombstone(tombstone(4, "", OTHER))
            await put(tier, 5, "b")
            await put(tier, 6, "y", namespace=OTHER)
            await tier.durability.sync()
        for _ in range(2):
            names = await recovered_names(tmp_path)
            assert names == expected({"c": 1, "b": 5, "y": 6})

    asyncio.run(main())


def test_partly_live_frames_say_which_blocks_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "abcd")
            await put(tier, 2, "b")
            await tier.frames.write_tombstone(tombstone(3, "d"))
        async with opened(tmp_path) as (_, recovered):
            assert [record.live for record in recovered.frames] == [(0, 2), (0,)]

    asyncio.run(main())


def test_frames_without_a_live_block_are_freed(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            for sequence in range(1, 6):
                await put(tier, sequence, ["same"], nbytes=100_000)
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered) == expected({"same": 5})
            await tier.upkeep.settle()
            assert tier.frames.physical_nbytes < 200_000

    asyncio.run(main())


def test_new_frames_go_to_a_fresh_segment(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "a")
        before = segments(tmp_path)
        async with opened(tmp_path) as (tier, recovered):
            extent = await put(tier, recovered.next_sequence, "b")
            assert extent.segment > recovered.frames[0].location.segment
        assert segments(tmp_path)[: len(before)] == before
        assert await recovered_names(tmp_path) == expected({"a": 1, "b": 2})

    asyncio.run(main())


def test_a_page_forged_inside_a_payload_is_not_taken_for_a_frame(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            victim = await put(tier, 1, "v")
            carrier = await put(tier, 2, "c", nbytes=40_960)
        path = segments(tmp_path)[0]
        data = path.read_bytes()
        page = data[victim.offset : victim.offset + victim.nbytes]
        with path.open("r+b") as file:
            file.seek(carrier.offset + 2 * PAGE_NBYTES)
            file.write(page)
        flip(path, victim.offset)
        assert await recovered_names(tmp_path) == {}

    asyncio.run(main())


def test_another_format_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "a")
        path = segments(tmp_path)[0]
        tag = parse_segment_name(path.name)
        assert tag is not None
        body = bytearray(encode_segment_header(tag)[:4088])
        struct.pack_into("<H", body, 8, 3)
        with path.open("r+b") as file:
            file.write(guard(bytes(body), 0))
        before = path.read_bytes()
        with pytest.raises(Incompatible, match="segment format 3"):
            await recovered_names(tmp_path)
        assert path.read_bytes() == before

    asyncio.run(main())


def test_a_renamed_segment_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "a")
        path = segments(tmp_path)[0]
        path.rename(tmp_path / f"{9:016x}-{9:016x}.segment")
        with pytest.raises(ConfigError, match="renamed or copied"):
            await recovered_names(tmp_path)

    asyncio.run(main())


def test_empty_and_garbage_segments_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / f"{1:016x}-{1:016x}.segment").touch()
        (tmp_path / f"{2:016x}-{2:016x}.segment").write_bytes(os.urandom(50_001))
        (tmp_path / "notes.txt").write_text("mine")
        async with opened(tmp_path) as (tier, recovered):
            assert recovered.frames == []
            await tier.upkeep.settle()
            assert tier.frames.physical_nbytes == 0
        assert segments(tmp_path) == []
        assert (tmp_path / "notes.txt").read_text() == "mine"

    asyncio.run(main())


def test_everything_is_private(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "a" / "b"
        async with opened(path) as (tier, _):
            await put(tier, 1, "a")
            assert path.stat().st_mode & 0o777 == 0o700
            for file in path.iterdir():
                assert file.stat().st_mode & 0o777 == 0o600
        assert isinstance(tier, FileTier)

    asyncio.run(main())
