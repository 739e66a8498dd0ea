"""Where blocks are, told for many at once, is what is told of each."""

from __future__ import annotations

import itertools

from kvstore.decide.changed import IN_DRAM, IN_FILES, Changed, Gone, place_of, places_of
from kvstore.decide.index import HeldSlot, StoredBlock, StoredFrame, StoredPart
from kvstore.model.block import BlockKey, Group, Namespace, Part, Slot


def _block(namespace: Namespace, where: tuple[int, ...]) -> StoredBlock:
    block = StoredBlock(BlockKey(bytes(32)), namespace.id, 0, None)
    parts = [Part(g, s) for g, group in enumerate(namespace.groups) for s in range(group.shards)]
    for part, place in zip(parts, where, strict=True):
        if not place:
            continue
        record = StoredPart(part, 4096, 0)
        if place & IN_DRAM:
            record.resident = HeldSlot(Slot(0, 0, 4096))
            block.resident_parts += 1
        if place & IN_FILES:
            record.frame = StoredFrame(None, part, 0, (4096,), 0)
            block.framed_parts += 1
        block.add(record)
    block.refresh(namespace)
    return block


def test_places_of_blocks_are_those_of_each() -> None:
    groups = (Group("a", 4096, shards=2), Group("w", 4096, window_tokens=64))
    namespace = Namespace(16, groups, (("model", "m"),))
    blocks = [_block(namespace, where) for where in itertools.product(range(4), repeat=3)]
    left = _block(namespace, (IN_DRAM, IN_DRAM, IN_DRAM))
    left.resident_parts = 0  # and its masks were not looked at since
    unknown = _block(namespace, (IN_DRAM, 0, 0))
    unknown.refresh(None)
    for needed in (0, 1, 2, 3):
        these = [*blocks, left, unknown]
        assert list(places_of(these, needed)) == [place_of(block, needed) for block in these]
    found = places_of(blocks, 1)
    assert {0, IN_DRAM, IN_FILES, IN_DRAM | IN_FILES} == set(found)
    assert places_of([left], 1) == bytes(1)


def test_what_could_not_be_told_does_not_hide_what_happened_since() -> None:
    """A block that was taken, and refused, has come back meanwhile; another one has not."""
    namespace = Namespace(16, (Group("a", 4096),), ())
    changed, told = Changed(), list[int]()
    changed.on_change = lambda: told.append(len(changed))
    other = BlockKey(bytes([1]) * 32)
    gone = Gone(BlockKey(bytes(32)), namespace.id)
    changed.note(gone)
    changed.note(Gone(other, namespace.id))
    refused = list(changed.take())
    back = _block(namespace, (IN_DRAM,))
    changed.note(back)
    for each in refused:
        changed.note_again(each)
    assert list(changed.take()) == [back, refused[1]]
    assert places_of([back, *refused], 1) == bytes([IN_DRAM, 0, 0])
    assert told == [0, 0]
