"""Rewrite what is stored in clear, encrypted: for a directory without a daemon.

A frame keeps its number, so whatever is newer than it stays newer. A segment is removed when its
frames are durable elsewhere. What it was stays in the free blocks of the disk until these are
written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.format.frame import FrameHeader, parse_header
from kvstore.model.block import PAGE_NBYTES, NamespaceId, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import ConfigError, CorruptBlock
from kvstore.tier.file.devices.note import NOTES, read_note, write_note
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.found import FrameRecord
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.pages import aligned_buffer
from kvstore.tier.file.segment import FileExtent, Segment
from kvstore.tier.file.spec_files import (
    read_spec_files,
    remove_spec_files,
    spec_files_in,
    write_spec_file,
)
from kvstore.tier.file.tier import FileTier
from kvstore.tier.file.twin_files import destroy_twins


class Resealed(NamedTuple):
    """frames: rewritten. damaged: dropped, because their bytes were not what was stored."""

    frames: int
    damaged: int


async def reseal(tier: FileTier, records: Sequence[FrameRecord]) -> Resealed:
    """Rewrite the plain segments of an open tier. records: all runs that are live in it."""
    frames = damaged = 0
    by_segment: dict[int, list[FrameRecord]] = {}
    for record in records:
        by_segment.setdefault(record.location.segment, []).append(record)
    for segment in [each for each in tier.space.segments if each.key is None]:
        runs = by_segment.get(segment.tag.number, [])
        old = [record.location for record in runs]
        for extent, tombstone in await _tombstones(tier, segment):
            await tier.frames.write_tombstone(tombstone)
            old.append(extent)
            frames += 1
        for record in runs:
            moved = await _move(tier, record)
            frames += moved
            damaged += not moved
        await tier.durability.sync()
        for extent in old:
            tier.frames.free(extent)
        await tier.upkeep.settle()
    return Resealed(frames, damaged)


async def _move(tier: FileTier, record: FrameRecord) -> bool:
    """Write a run anew; False if it is damaged."""
    header: FrameHeader = record.header
    payload = [aligned_buffer(padded(block.stored_nbytes)) for block in header.blocks]
    try:
        await tier.frames.read(record.location, PAGE_NBYTES, payload)
    except CorruptBlock:
        return False
    for block, buffer in zip(header.blocks, payload, strict=True):
        if checksum(buffer[: block.stored_nbytes]) != block.stored_checksum:
            return False
    extent = tier.frames.allocate(header.nbytes)
    if extent is None:
        raise ConfigError("there is no room for the encrypted copy of a segment")
    await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
    return True


async def _tombstones(tier: FileTier, segment: Segment) -> list[tuple[FileExtent, FrameHeader]]:
    found = []
    for offset, frame in list(segment.frames.items()):
        if not frame.is_tombstone:
            continue
        extent, page = FileExtent(segment.tag.number, offset, frame.nbytes), aligned_buffer(1)
        await tier.frames.read(extent, 0, [page])
        header = parse_header(page, segment.tag, offset)
        if header is None:
            raise CorruptBlock(
                f"a delete in {segment.tag.number:016x} is damaged, and what it deleted could come "
                "back: remove that segment's file first"
            )
        found.append((extent, header))
    return found


def reseal_notes(
    disk: Disk, path: Path, keys: DirectoryKeys, namespaces: Sequence[NamespaceId]
) -> None:
    """Encrypt what a directory says of itself beside its segments. Blocking."""
    for kind in NOTES:
        note = read_note(disk, path, twins=kind)
        if note.number and read_note(disk, path, keys, kind).number == 0:
            destroy_twins(disk, path, kind)
            write_note(disk, path, note.data, keys, kind)
    for namespace in read_spec_files(disk, path, namespaces):
        write_spec_file(disk, path, namespace, keys)
    plain = set(namespaces) & set(spec_files_in(disk, path))
    remove_spec_files(disk, path, plain)
