"""FrameIndex to write, and a tier with the few lines a caller needs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.format.frame import FrameHeader, FrameKind, RunBlock
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock
from kvstore.sealing import FileRoot, Sealing
from kvstore.testing.disks import FaultyDisk
from kvstore.testing.tier import pages
from kvstore.tier.file import (
    Devices,
    FileExtent,
    FileTier,
    FrameRecord,
    Mount,
    Placed,
)

ROOT = FileRoot(bytes(range(32)))
SEALING = Sealing(ROOT)
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


class FrameIndex:
    """What several devices hold, as the index of a node has it: an `admission.Listener`."""

    def __init__(self, tier: Devices) -> None:
        self.tier = tier
        self.live: dict[BlockKey, tuple[int, Placed]] = {}  # sequence and frame
        self.changed = asyncio.Event()

    async def withdrawn(self, mount: Mount) -> None:
        self.live = {k: found for k, found in self.live.items() if found[1].mount is not mount}
        self.changed.set()

    def admitted(self) -> None:
        while self.tier.recall.unrecalled_runs:
            self.take(self.tier.recall.take_oldest(2))
        self.changed.set()

    def take(self, records: Sequence[FrameRecord]) -> None:
        for record in records:
            header = record.header
            for block in (header.blocks[position].key for position in record.live):
                if self.live.get(block, (0, None))[0] < header.sequence:
                    self.live[block] = header.sequence, record.location

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a device that comes or goes has made it true; pytest bounds it."""
        while not condition():
            self.changed.clear()
            with contextlib.suppress(TimeoutError):  # a state changes after what is heard here
                await asyncio.wait_for(self.changed.wait(), 0.05)

    @property
    def sequences(self) -> dict[BlockKey, int]:
        return {key: sequence for key, (sequence, _) in self.live.items()}


async def put_on(
    tier: Devices, index: FrameIndex, names: Sequence[object], **fields: Any
) -> Placed:
    """Write a run durably where there must be room, and index it."""
    header, payload = run(tier.sequences.take(), names, **fields)
    place = tier.frames.allocate(header.nbytes)
    assert place is not None
    await tier.frames.write(place, [tier.frames.encode(place, header), *payload])
    assert await tier.frames.sync([place]) == {}
    for name in names:
        index.live[key(name)] = header.sequence, place
    return place


async def bury(tier: Devices, index: FrameIndex, names: Sequence[object]) -> None:
    """Delete names durably; a frame of which nothing is left is freed."""
    header = tombstone(tier.sequences.take(), names)
    gone = [index.live.pop(key(name)) for name in names if key(name) in index.live]
    await tier.tombstones.bury([header])
    held = {place for _, place in index.live.values()}
    for place in {place for _, place in gone} - held:
        tier.frames.free(place)


async def put(tier: FileTier, sequence: int, names: Sequence[object], **fields: Any) -> FileExtent:
    """Write a run where there must be room."""
    header, payload = run(sequence, names, **fields)
    extent = tier.frames.allocate(header.nbytes)
    assert extent is not None
    await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
    return extent


async def verify(tier: FileTier, record: FrameRecord) -> None:
    """Read every live block of a record and check it. Raises CorruptBlock."""
    for position in record.live:
        block, offset = record.header.blocks[position], record.header.offsets[position]
        target = pages(block.stored_nbytes)
        await tier.frames.read(record.location, offset, [target])
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
    return Opened(tier.recall.take_all(), recovered.next_sequence, recovered.dropped_frames)


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
    await tier.upkeep.settle()
    try:
        yield tier, recovered
        await tier.upkeep.settle()
    finally:
        disk.kill()
