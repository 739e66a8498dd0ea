"""Where blocks are is read when somebody looks, of those that rest as of those that are awake."""

from __future__ import annotations

import gc
import itertools

import pytest

from kvstore.decide.changed import IN_DRAM, IN_FILES, Changed
from kvstore.decide.index import HeldSlot, Index, StoredBlock, StoredFrame, StoredPart
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Part, Slot
from kvstore.testing.policy import key

GROUPS = (Group("a", 4096, shards=2), Group("w", 4096, window_tokens=64))
SPACE = Namespace(16, GROUPS, (("model", "m"),))
PARTS = [Part(g, s) for g, group in enumerate(GROUPS) for s in range(group.shards)]
WHERE = list(itertools.product(range(4), repeat=len(PARTS)))  # of each part the tiers, as bits


def _fill(index: Index, namespace_id: NamespaceId, at: int, where: tuple[int, ...]) -> None:
    block = StoredBlock(key(at), namespace_id, at, None)
    for part, place in zip(PARTS, where, strict=True):
        if not place:
            continue
        record = StoredPart(index.own_part(part), 4096, 0)
        if place & IN_DRAM:
            record.resident = HeldSlot(Slot(0, 4096 * at, 4096))
            record.resident.indexed = True
            block.resident_parts += 1
        if place & IN_FILES:
            record.frame = StoredFrame(None, part, 0, (4096,), 0)
            block.framed_parts += 1
        block.add(record)
    index.add(block)
    index.refresh(block)


def _filled(index: Index) -> list[BlockKey]:
    """Store a block for each of WHERE; return their keys."""
    for at, where in enumerate(WHERE, 1):
        _fill(index, SPACE.id, at, where)
    return [key(at) for at in range(1, len(WHERE) + 1)]


def _said(where: tuple[int, ...], needed: int) -> int:
    """Say where a block is, of the tiers of its parts alone."""
    groups = [where[:2], where[2:]]
    wanted = [parts for g, parts in enumerate(groups) if needed >> g & 1]
    if wanted:
        return IN_DRAM & _in_all(wanted) | IN_FILES & _in_all(wanted)
    if not any(map(all, groups)):
        return 0
    dram = any(IN_DRAM & _in_all([parts]) for parts in groups)
    files = all(place & IN_FILES for place in where if place)
    return IN_DRAM * dram | IN_FILES * files


def _in_all(groups: list[tuple[int, ...]]) -> int:
    """Return the tiers, as bits, that have every part of some groups."""
    tiers = IN_DRAM | IN_FILES
    for place in itertools.chain(*groups):
        tiers &= place
    return tiers


def _awake(index: Index) -> int:
    return len(index._blocks.awake)


@pytest.mark.parametrize("needed", range(4))
def test_places_are_those_of_the_parts(needed: int) -> None:
    index = Index()
    index.register(SPACE)
    keys = [*_filled(index), key(1000)]  # the last one is not there
    said = [*(_said(where, needed) for where in WHERE), 0]
    assert {0, IN_DRAM, IN_FILES, IN_DRAM | IN_FILES} == set(said)
    assert list(index.places(SPACE.id, keys, needed)) == said
    gc.collect()
    index.rest()
    awake = _awake(index)
    assert awake < len(WHERE) // 4  # those of no record
    assert list(index.places(SPACE.id, keys, needed)) == said
    assert list(index.places(SPACE.id, keys[::-1], needed)) == said[::-1]
    assert _awake(index) == awake  # it woke none


def test_a_block_is_where_it_was_noted_no_more() -> None:
    """It left, or came back, and all that is known of it is its key."""
    index, changed = Index(), Changed()
    index.register(SPACE)
    index.changed = changed
    for at in (1, 2, 3):
        _fill(index, SPACE.id, at, (IN_DRAM,) * 3)
    gc.collect()
    index.rest()
    assert _awake(index) == 0  # though all are noted
    for at in (2, 3):
        block = index.by_key(key(at))
        assert block is not None
        index.remove(block)
    _fill(index, SPACE.id, 3, (IN_FILES,) * 3)
    assert list(changed.take()) == [(key(at), SPACE.id) for at in (1, 2, 3)]
    found = index.places(SPACE.id, [key(at) for at in (1, 2, 3)], 1)
    assert list(found) == [IN_DRAM, 0, IN_FILES]
    assert not len(changed)


def test_blocks_of_another_namespace_are_nowhere() -> None:
    index = Index()
    other = index.register(Namespace(16, GROUPS, (("model", "other"),)))
    index.register(SPACE)
    keys = _filled(index)
    assert index.places(other, keys, 1) == bytes(len(keys))
    assert index.places(NamespaceId(bytes(32)), keys, 1) == bytes(len(keys))


@pytest.mark.parametrize("rests", [False, True])
def test_blocks_that_came_before_their_namespace_are_judged(rests: bool) -> None:
    """Those of a file of an earlier life: an incomplete one is nowhere."""
    index, changed = Index(), Changed()
    keys = _filled(index)
    assert index.places(SPACE.id, keys, 1) == bytes(len(keys))  # nobody knows what a block is
    if rests:
        gc.collect()
        index.rest()
    index.register(SPACE)
    index.changed = changed
    said = [_said(where, 1) for where in WHERE]
    assert list(index.places(SPACE.id, keys, 1)) == said
    list(changed.take())
    assert list(index.places(SPACE.id, keys, 1)) == said
    assert not len(changed)  # they are judged once


def test_the_first_change_is_told_at_once_and_each_key_is_noted_once() -> None:
    changed, told = Changed(), list[int]()
    changed.on_change = lambda: told.append(len(changed))
    for at in (1, 2, 1):
        changed.note(key(at), SPACE.id)
    assert [each for each, _ in changed.take()] == [key(1), key(2)]
    changed.note(key(2), SPACE.id)
    assert told == [0, 0]
