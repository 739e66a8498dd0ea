"""A planner over spaces that only count, and what tests ask of it."""

from __future__ import annotations

from typing import TypeVar, cast

from kvstore.decide.index import StoredFrame
from kvstore.decide.planner import Planner, Reservation, Steps, Write
from kvstore.model.block import BlockKey, Group, Namespace, Part, Slot, Span
from kvstore.model.keys import KeyChain, root_key
from kvstore.tier.dram.allocator import ExtentAllocator

RECORD = 4096


SPEC = Namespace(2, (Group("full", RECORD), Group("window", RECORD, 5, shards=2)), ())


PARTS = [Part(0, 0), Part(1, 0), Part(1, 1)]


CHAINS = [KeyChain(root_key(SPEC.id), 2).update([chain] * 24) for chain in range(3)]


T = TypeVar("T")


def at_once(steps: Steps[T]) -> T:
    """Take all steps of a decision and return it."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast(T, done.value)


class CountingSpace:
    """Space of a tier that insists on getting back exactly what it gave."""

    def __init__(self, capacity: int) -> None:
        self._allocator = ExtentAllocator(capacity)
        self.live: set[Slot] = set()

    def allocate(self, nbytes: int) -> Slot | None:
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            return None
        place = Slot(0, offset, nbytes)
        self.live.add(place)
        return place

    def free(self, place: Slot) -> None:
        self.live.remove(place)
        self._allocator.free(place.offset, place.nbytes)


class Node:
    """A planner over spaces of a few records, with every move done at once."""

    def __init__(self, dram_records: int, file_records: int = 100) -> None:
        self.file = CountingSpace(file_records * RECORD)
        dram = CountingSpace(dram_records * RECORD)
        self.planner = Planner(dram, self.file, now=lambda: 0.0, read_nbytes_max=3 * RECORD)
        self.planner.index.register(SPEC)

    def put(self, keys: list[BlockKey], part: Part = PARTS[0]) -> int:
        spans = (Span(part, 0, len(keys)),)
        placement = at_once(self.planner.puts.place(SPEC.id, keys, spans))
        reservation = Reservation(SPEC.id, keys, 0, None, spans, placement.refused)
        at_once(self.planner.puts.commit(reservation, placement.held, [7] * len(keys)))
        return placement.refused

    def write_all(self) -> list[Write]:
        writes = self.planner.writes.take(1 << 40)
        for write in writes:
            extent = self.file.allocate(write.nbytes)
            self.planner.writes.done(write, extent, 0, (RECORD,) * len(write.blocks), 1)
        return writes


def chain_of(blocks: int) -> list[BlockKey]:
    return KeyChain(root_key(SPEC.id), 2).update([9] * 2 * blocks)


def found(node: Node, keys: list[BlockKey], checksum: int, sequence: int) -> StoredFrame:
    """Index a frame as that of a disk that is back."""
    extent = node.file.allocate(len(keys) * RECORD)
    assert extent is not None
    frame = StoredFrame(extent, PARTS[0], 0, (RECORD,) * len(keys), sequence)
    blocks = [(at, key, RECORD, checksum) for at, key in enumerate(keys)]
    node.planner.recovery.add(SPEC.id, frame, blocks, first_block=0, parent=None)
    return frame


def resident(node: Node, keys: list[BlockKey]) -> int:
    records = node.planner.find(SPEC.id, keys, (Span(PARTS[0], 0, len(keys)),))
    return sum(record is not None and record.resident is not None for record in records)
