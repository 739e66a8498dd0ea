"""Directories looked into without being taken into use."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

import pytest

from kvstore.format.frame import encode_segment_header
from kvstore.format.frame.page import guard
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import ConfigError, Incompatible
from kvstore.tier.file import Audit, FileExtent, Problem, RealDisk
from kvstore.tier.file.segment_file import parse_segment_name
from tests.tier.file.frames import (
    NAMESPACE,
    OTHER,
    flip,
    key,
    killed,
    opened,
    physical_nbytes,
    put,
    segments,
    tombstone,
)


async def fill(path: Path, count: int = 30) -> list[FileExtent]:
    """Write runs of 4 blocks into a directory that is then closed; return where they are."""
    async with opened(path) as (tier, _):
        extents = [
            await put(tier, sequence, [f"{sequence}-{i}" for i in range(4)])
            for sequence in range(1, count + 1)
        ]
        await tier.durability.sync()
    return extents


def path_of(path: Path, extent: FileExtent) -> Path:
    (file,) = (
        each
        for each in segments(path)
        if (tag := parse_segment_name(each.name)) and tag.number == extent.segment
    )
    return file


def test_what_is_there_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            await put(tier, 2, "bc")
            await put(tier, 3, "xy", namespace=OTHER)
            await put(tier, 4, "d")
            await tier.durability.sync([await tier.frames.write_tombstone(tombstone(5, "d"))])

    asyncio.run(main())
    audit = Audit(tmp_path)
    (segment,) = audit.segments
    assert (segment.sealed, segment.runs, segment.tombstones, segment.dropped) == (True, 4, 1, 0)
    assert (segment.records, segment.live_records) == (7, 5)
    assert segment.dead_nbytes == PAGE_NBYTES + 3 * PAGE_NBYTES, "d is dead, b not alone in its run"
    assert segment.physical_nbytes == physical_nbytes(tmp_path)
    assert {each: report.blocks for each, report in audit.namespaces.items()} == {
        NAMESPACE: 3,
        OTHER: 2,
    }
    assert list(audit.verify()) == []


def test_looking_changes_nothing_and_needs_no_lock(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            await tier.durability.sync()
            before = {file: file.stat() for file in segments(tmp_path)}
            audit = Audit(tmp_path)
            assert [segment.sealed for segment in audit.segments] == [False]
            assert list(audit.verify()) == []
            for file, status in before.items():
                now = file.stat()
                assert (now.st_mtime_ns, now.st_size) == (status.st_mtime_ns, status.st_size)

    asyncio.run(main())
    assert {each.name for each in tmp_path.iterdir()} - {"LOCK"} == {
        each.name for each in segments(tmp_path)
    }


@pytest.mark.parametrize("sealed", [True, False])
def test_every_flipped_bit_of_a_payload_is_found_and_named(tmp_path: Path, sealed: bool) -> None:
    """In an unsealed segment the scan drops the frame at once: then it is counted as dropped."""

    async def main() -> None:
        async with (opened if sealed else killed)(tmp_path) as (tier, _):
            extents = [await put(tier, n, [f"{n}-{i}" for i in range(4)]) for n in range(1, 11)]
            await tier.durability.sync()
        for extent in extents[3], extents[5]:
            flip(path_of(tmp_path, extent), extent.offset + PAGE_NBYTES + 3 * PAGE_NBYTES + 77)

    asyncio.run(main())
    audit = Audit(tmp_path)
    damages = list(audit.verify())
    if sealed:
        assert [damage.key for damage in damages] == [key("4-1"), key("6-1")]
        assert {damage.problem for damage in damages} == {Problem.PAYLOAD}
        assert all(damage.live for damage in damages)
    else:
        assert damages == []
    assert sum(segment.dropped for segment in audit.segments) == (0 if sealed else 2)


def test_a_rotten_header_page_and_a_cut_file_are_damage(tmp_path: Path) -> None:
    extents = asyncio.run(fill(tmp_path, 10))  # in one segment
    flip(path_of(tmp_path, extents[0]), extents[0].offset + 200)
    (damage,) = Audit(tmp_path).verify()
    assert (damage.problem, damage.key, damage.offset) == (Problem.HEADER, None, extents[0].offset)

    class Torn(RealDisk):
        """Sees a device that refuses one page, behind a good footer."""

        def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            nbytes = sum(buffer.nbytes for buffer in buffers)
            if nbytes > PAGE_NBYTES and offset == extents[5].offset + PAGE_NBYTES:
                raise OSError(5, "refused")
            return super().preadv(fd, buffers, offset)

    found = [damage for damage in Audit(tmp_path, Torn()).verify() if damage.key]
    assert [(damage.problem, damage.key) for damage in found] == [(Problem.UNREADABLE, key("6-0"))]


def test_what_leaves_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    extents = asyncio.run(fill(tmp_path))
    audit = Audit(tmp_path)
    nbytes = audit.nbytes
    file = path_of(tmp_path, extents[0])
    fd = os.open(file, os.O_RDWR)
    RealDisk().punch(fd, extents[0].offset, extents[0].nbytes)
    os.close(fd)
    path_of(tmp_path, extents[-1]).unlink()
    seen: list[int] = []
    assert list(audit.verify(seen.append)) == []
    assert sum(seen) == nbytes


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Audit(tmp_path / "nowhere")
    assert Audit(tmp_path).segments == []
    asyncio.run(fill(tmp_path, 1))
    (file,) = segments(tmp_path)
    tag = parse_segment_name(file.name)
    assert tag is not None
    body = bytearray(encode_segment_header(tag)[:4088])
    struct.pack_into("<H", body, 8, 3)
    with file.open("r+b") as target:
        target.write(guard(bytes(body), 0))
    with pytest.raises(Incompatible):
        Audit(tmp_path)
