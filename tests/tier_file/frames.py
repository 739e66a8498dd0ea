"""Frames to write, and a tier with the few lines a mover needs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.block import BlockKey, NamespaceId, Part
from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.frame import FrameHeader, FrameKind, RunBlock
from kvstore.testing.disks import FaultyDisk
from kvstore.testing.tier import pages
from kvstore.tier.file import FileExtent, FileTier, FrameRecord

NAMESPACE = NamespaceId(b"n" * 32)
OTHER = NamespaceId(b"o" * 32)
MIB = 1 << 20


def key(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(repr(name).encode()).digest())


def run(
    sequence: int,
    names: Sequence[object],
    *,
    nbytes: int = 9000,
    namespace: NamespaceId = NAMESPACE,
    part: Part = Part(0, 0),  # noqa: B008 - immutable
) -> tuple[FrameHeader, list[memoryview]]:
    """Return a raw run of one block per name, each filled from its name and the sequence."""
    payload = [pages(nbytes, seed=f"{name} {sequence}") for name in names]
    blocks = []
    for name, page in zip(names, payload, strict=True):
        value = checksum(page[:nbytes])
        blocks.append(RunBlock(key(name), nbytes, nbytes, value, value))
    header = FrameHeader(
        kind=FrameKind.RUN,
        sequence=sequence,
        namespace_id=namespace,
        part=part,
        blocks=tuple(blocks),
    )
    return header, payload


def tombstone(
    sequence: int, names: Sequence[object], namespace: NamespaceId = NAMESPACE
) -> FrameHeader:
    """Return a tombstone of keys; of the whole namespace without names."""
    kind = FrameKind.TOMBSTONE_KEYS if names else FrameKind.TOMBSTONE_NAMESPACE
    killed = tuple(key(name) for name in names)
    return FrameHeader(kind=kind, sequence=sequence, namespace_id=namespace, killed=killed)


async def put(tier: FileTier, sequence: int, names: Sequence[object], **fields: Any) -> FileExtent:
    """Write a run where there must be room."""
    header, payload = run(sequence, names, **fields)
    extent = tier.allocate(header.nbytes)
    assert extent is not None
    await tier.write(extent, [tier.encode(extent, header), *payload])
    return extent


async def verify(tier: FileTier, record: FrameRecord) -> None:
    """Read every live block of a record and check it. Raises CorruptBlock."""
    for position in record.live:
        block, offset = record.header.blocks[position], record.header.offsets[position]
        target = pages(block.stored_nbytes)
        await tier.read(record.location, offset, [target])
        if checksum(target[: block.stored_nbytes]) != block.stored_checksum:
            raise CorruptBlock("not the bytes that were put")


@dataclass(frozen=True, slots=True)
class Opened:
    """What `Recovered` says, and all frames, indexed: only what is newest of a record is live."""

    frames: list[FrameRecord]
    next_sequence: int
    dropped_frames: int


async def recover(tier: FileTier) -> Opened:
    """Open a tier and recall everything."""
    recovered = await tier.open()
    return Opened(tier.recall_all(), recovered.next_sequence, recovered.dropped_frames)


def live(recovered: Opened) -> dict[BlockKey, int]:
    """Return which keys are live, and in the frame of which sequence."""
    return {
        record.header.blocks[position].key: record.header.sequence
        for record in recovered.frames
        for position in record.live
    }


def expected(names: dict[object, int]) -> dict[BlockKey, int]:
    return {key(name): sequence for name, sequence in names.items()}


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.segment"))


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def physical_nbytes(path: Path) -> int:
    return sum(segment.stat().st_blocks * 512 for segment in segments(path))


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[tuple[FileTier, Opened]]:
    """Open a tier of 32 MiB with segments of 1 MiB, and close it."""
    tier = FileTier(path, **{"capacity_bytes": 32 * MIB, "segment_nbytes": MIB, **settings})
    recovered = await recover(tier)
    try:
        yield tier, recovered
    finally:
        await tier.close()


@asynccontextmanager
async def unrecalled(path: Path, **settings: Any) -> AsyncIterator[FileTier]:
    """The same, with nothing recalled."""
    tier = FileTier(path, **{"capacity_bytes": 32 * MIB, "segment_nbytes": MIB, **settings})
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


@asynccontextmanager
async def killed(path: Path, **settings: Any) -> AsyncIterator[tuple[FileTier, Opened]]:
    """Open a tier and, at the end, take its descriptors away as a kill -9 does."""
    disk = settings.setdefault("disk", FaultyDisk())
    tier = FileTier(path, **{"capacity_bytes": 32 * MIB, "segment_nbytes": MIB, **settings})
    recovered = await recover(tier)
    await tier.settle()
    try:
        yield tier, recovered
        await tier.settle()
    finally:
        disk.kill()
