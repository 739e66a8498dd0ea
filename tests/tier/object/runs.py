"""Runs to store, and what must come back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstore.format.frame import RUN_BLOCKS_MAX, FrameHeader, FrameKind, RunBlock
from kvstore.model.block import BlockKey, NamespaceId, Part, padded
from kvstore.model.checksum import checksum
from kvstore.testing.samples import sample_keys, sample_record
from kvstore.testing.tier import pages
from kvstore.tier.object import Found, ObjectRead

NAMESPACE = NamespaceId(bytes(range(32)))
NBYTES = 20_000
PARTS = (Part(0, 0), Part(1, 3))
Frame = tuple[FrameHeader, list[memoryview]]


def record(key: BlockKey, part: Part, nbytes: int = NBYTES) -> bytes:
    """Return the record of a part of a block."""
    return sample_record(BlockKey(bytes([part.group, part.shard]) + key), nbytes)


def frames(
    prefix: Sequence[BlockKey],
    first: int = 0,
    end: int | None = None,
    *,
    parts: Sequence[Part] = PARTS,
    namespace_id: NamespaceId = NAMESPACE,
    nbytes: int = NBYTES,
) -> list[Frame]:
    """Return the frames, raw, of the blocks prefix[first:end]."""
    stop = len(prefix) if end is None else end
    return [
        _frame(prefix, range(begin, min(begin + RUN_BLOCKS_MAX, stop)), part, namespace_id, nbytes)
        for part in parts
        for begin in range(first, stop, RUN_BLOCKS_MAX)
    ]


def _frame(
    prefix: Sequence[BlockKey], at: range, part: Part, namespace_id: NamespaceId, nbytes: int
) -> Frame:
    blocks, payload = [], []
    for key in (prefix[index] for index in at):
        raw = record(key, part, nbytes)
        buffer = pages(nbytes)
        buffer[:nbytes] = raw
        payload.append(buffer)
        blocks.append(RunBlock(key, nbytes, nbytes, checksum(raw), checksum(raw)))
    header = FrameHeader(
        kind=FrameKind.RUN,
        sequence=77,
        namespace_id=namespace_id,
        part=part,
        first_block=at.start,
        parent=prefix[at.start - 1] if at.start else None,
        blocks=tuple(blocks),
    )
    return header, payload


def prefix_of(name: str, count: int, like: Sequence[BlockKey] = ()) -> list[BlockKey]:
    """Return a prefix's keys, the first of which are those of `like`."""
    return [*like, *sample_keys(name, count)[len(like) :]]


def records_found(found: Found) -> dict[tuple[Part, BlockKey], int]:
    """Return the raw checksum of every record that was found."""
    return {
        (header.part, header.blocks[at].key): header.blocks[at].raw_checksum
        for _, header, live in found.frames
        for at in live
    }


def reads_of(found: Found) -> tuple[list[ObjectRead], list[tuple[Part, BlockKey, memoryview]]]:
    """Return reads of every record that was found, each into memory of its own."""
    reads, targets = [], []
    for location, header, live in found.frames:
        for at in live:
            block = header.blocks[at]
            target = pages(padded(block.stored_nbytes))
            exact = target[: block.stored_nbytes]
            reads.append(ObjectRead(location, header.offsets[at], [exact], block=(header, at)))
            targets.append((header.part, block.key, target))
    return reads, targets


def alike(*lists: Sequence[BlockKey]) -> int:
    """Return how many keys the lists share from the start."""
    same = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*lists, strict=False))
    return sum(1 for _ in same)
