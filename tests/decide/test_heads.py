"""Which blocks stand for a prefix, and what is told of them as they come and leave."""

from __future__ import annotations

from pathlib import Path

from kvstore.decide.heads import CHANGES_KEPT, Change, Heads, head_of, head_step, heads_of
from kvstore.decide.index import Index, StoredBlock, StoredPart
from kvstore.model.block import Group, Namespace, Part
from kvstore.model.keys import KeyChain, root_key
from tests.store.node import SPEC, Node, chain

FULL = Namespace(16, (Group("all", 4096), Group("window", 4096, window_tokens=64)), ())
KEYS = KeyChain(root_key(FULL.id), 16).update([5] * 16 * 64)


def stored(index: int, *, complete: int = 0b01) -> StoredBlock:
    block = StoredBlock(KEYS[index], FULL.id, index, None)
    block.complete = complete
    return block


def test_a_head_stands_for_256_tokens() -> None:
    assert [head_step(tokens) for tokens in (1, 16, 128, 256, 1000)] == [256, 16, 2, 1, 1]
    heads, step = heads_of(KEYS, 16)
    assert step == 16
    assert heads == [head_of(KEYS[at]) for at in (15, 31, 47, 63)]


def test_what_comes_and_leaves_is_told_once() -> None:
    heads = Heads()
    for at in range(64):
        heads.look(stored(at), FULL)
        heads.look(stored(at), FULL)
    assert sorted(heads.at(0)) == sorted(head_of(KEYS[at]) for at in (15, 31, 47, 63))
    assert sorted(heads.at(1)) == sorted(head_of(KEYS[at]) for at in (31, 63))
    assert heads.at(2) == [head_of(KEYS[63])]
    heads.look(stored(31, complete=0b10), FULL)  # the window group is there, the other one is not
    heads.left(KEYS[63])
    heads.left(KEYS[63])
    told = heads.since(4, 10)
    assert told == [Change(head_of(KEYS[31]), False, 1), Change(head_of(KEYS[63]), False, 2)]
    assert heads.since(6, 10) == []
    assert heads.since(7, 10) is None  # of another start
    assert len(heads) == 2


def test_a_block_of_windows_alone_is_told_when_it_has_something() -> None:
    windows, heads = Namespace(16, (Group("window", 4096, window_tokens=64),), ()), Heads()
    heads.look(stored(15, complete=0), windows)
    assert not len(heads)
    heads.look(stored(15, complete=1), windows)
    assert len(heads) == 1


def test_blocks_are_told_that_were_found_before_their_namespace_was_known() -> None:
    index = Index()
    index.heads = Heads()
    block = StoredBlock(KEYS[15], FULL.id, 15, None)
    index.add(block)
    block.add(StoredPart(Part(0, 0), 4096, 1))
    index.refresh(block)
    assert not len(index.heads)
    index.register(FULL)
    index.find(FULL.id, KEYS)
    assert index.heads.at(0) == [head_of(KEYS[15])]


def test_a_gap_is_said() -> None:
    heads = Heads()
    for _ in range(CHANGES_KEPT // 2 + 1):
        heads.look(stored(15), FULL)
        heads.left(KEYS[15])
    assert heads.number == CHANGES_KEPT + 2
    assert heads.since(1, 10) is None
    assert len(heads.since(2, 10) or ()) == 10


def test_a_store_tells_what_it_has_in_any_tier(tmp_path: Path) -> None:
    keys = chain(1, 300)  # of 2 tokens: a head is every 128th
    with Node(tmp_path, arena_bytes=16 << 20) as node:
        heads = node.planner.index.heads = Heads()
        for begin in range(0, 300, 20):
            node.put(keys, begin, begin + 20, durable=True)
        assert sorted(heads.at(0)) == sorted([head_of(keys[127]), head_of(keys[255])])
        node.run(node.store.deletes.delete(SPEC.id, keys[255:256]))
        assert heads.at(0) == [head_of(keys[127])]
        node.run(node.store.deletes.clear(SPEC.id))
        assert heads.at(0) == []
