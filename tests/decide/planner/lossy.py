"""A planner of a lossy namespace over spaces that only count. Writers are told apart by checksum:
all records of one writer have the same, so a fine part belongs to a base of its own checksum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.decide.index import StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner import Planner, base_of
from kvstore.model.block import BlockKey, Group, Namespace, Part, Span, padded
from kvstore.model.keys import KeyChain, root_key

PAGE = 4096
BASE, FINE, EXACT_MAX = 5000, 3000, 3 * PAGE

SPEC = Namespace(
    2,
    (
        Group("full", EXACT_MAX, varies=True),
        Group("window", EXACT_MAX, 5, shards=2, varies=True),
        Group("full.fine", FINE, refines=0, base_nbytes=BASE),
        Group("window.fine", FINE, 5, shards=2, refines=1, base_nbytes=BASE),
    ),
    (),
    fidelity="ep",
)
BASES = [Part(0, 0), Part(1, 0), Part(1, 1)]
FINES = [Part(2, 0), Part(3, 0), Part(3, 1)]
BLOCKS = 8
CHAINS = [KeyChain(root_key(SPEC.id), 2).update([chain] * 2 * BLOCKS) for chain in range(2)]
WRITERS = (1, 2)


def base_nbytes(block: int, writer: int) -> int:
    """Return the size of a base record: exact ones have other sizes, and no fine part."""
    if block == 0 or (block + writer) % 5 == 0:
        return EXACT_MAX - 64 * (block + writer)
    return BASE


def record_nbytes(part: Part, block: int, writer: int) -> int:
    return FINE if part in FINES else base_nbytes(block, writer)


def spans_of(bases: Sequence[Part], blocks: int, *, fine: bool) -> tuple[Span, ...]:
    parts = [*bases, *(FINES[BASES.index(base)] for base in bases if fine)]
    return tuple(Span(part, 0, blocks) for part in parts)


class Item(NamedTuple):
    """One record's name."""

    key: BlockKey
    part: Part


class OnDisk(NamedTuple):
    """A frame as a disk has it: what a start finds of it again."""

    part: Part
    sequence: int
    first_block: int
    parent: BlockKey | None
    sizes: tuple[int, ...]
    blocks: tuple[tuple[int, BlockKey, int, int], ...]  # live: position, key, bytes, checksum

    @property
    def nbytes(self) -> int:
        return sum(map(padded, self.sizes))

    def index(self, planner: Planner, extent: object) -> StoredFrame:
        """Let a planner find it."""
        frame = StoredFrame(extent, self.part, 0, self.sizes, self.sequence)
        planner.recovery.add(
            SPEC.id, frame, self.blocks, first_block=self.first_block, parent=self.parent
        )
        return frame


def records(planner: Planner) -> Iterator[tuple[StoredBlock, StoredPart]]:
    for block in planner.index:
        for record in block.records:
            yield block, record


def fine_with_bases(planner: Planner) -> Iterator[tuple[StoredPart, StoredPart | None]]:
    """Yield the fine parts that the arena has, and their bases."""
    for block, record in records(planner):
        if record.part in FINES and record.resident is not None:
            yield record, block.record(base_of(SPEC, record.part))


def durable_bases(planner: Planner) -> set[Item]:
    """Return the bases that a frame has, be it one of an older version."""
    kept = planner._ledger.replaced
    return {
        Item(block.key, record.part)
        for block, record in records(planner)
        if record.part in BASES and (record.frame or kept.of(record))
    }
