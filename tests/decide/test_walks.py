"""All blocks, a few in a step: those that stay are met once, whatever comes and goes."""

from __future__ import annotations

from kvstore.decide.index import Index
from kvstore.decide.walks import ORDER_MAX, WALK_ROWS
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.testing.policy import key
from tests.decide.test_resting import SPEC, filled

OTHER = NamespaceId(bytes(32))
BLOCKS = 3 * WALK_ROWS


def indexed(blocks: int = BLOCKS, *, framed: bool = False) -> Index:
    """Return an index of resting blocks 1..; one of three is of the other namespace."""
    index = Index()
    for at in range(1, blocks + 1):
        block = filled([(5, 4096, True, framed, 0)], at)
        block.namespace_id = SPEC.id if at % 3 else OTHER
        index.add(block)
    del block
    index.rest()
    return index


def add(index: Index, at: int) -> None:
    index.add(filled([(5, 4096, True, False, 0)], at))


def remove(index: Index, at: int) -> None:
    block = index.by_key(key(at))
    assert block is not None
    index.remove(block)


def test_a_step_yields_what_it_looked_at_and_no_more_than_was_asked_for() -> None:
    index = indexed()
    steps = list(index.walks.steps(most=100))
    assert max(map(len, steps)) == 100
    assert [each for step in steps for each in step] == [key(at + 1) for at in range(BLOCKS)]
    of_other = list(index.walks.steps({OTHER}))
    assert len(of_other) == -(-BLOCKS // WALK_ROWS)
    assert [each for step in of_other for each in step] == [
        key(at) for at in range(3, BLOCKS + 1, 3)
    ]
    assert not index._blocks.awake


def test_what_stays_is_met_once_and_what_comes_is_noted() -> None:
    index = indexed()
    with index.noting() as came:
        walk = index.walks.steps()
        met = next(walk)
        for at in range(1, 6):  # they have been met, and one after the other their rows are free
            remove(index, at)
            add(index, BLOCKS + at)
        remove(index, BLOCKS)
        met += [each for step in walk for each in step]
    add(index, BLOCKS + 6)
    assert met == [key(at) for at in range(1, BLOCKS)]
    assert came == [key(BLOCKS + at) for at in range(1, 6)]
    assert index.walks.kept(came) == came
    assert index.walks.kept([key(1), key(3), key(7), key(6)], {OTHER}) == [key(6)]


def unwritten(index: Index, came: int | None = None) -> list[BlockKey]:
    return [each for step in index.walks.unwritten(came) for each in step]


def test_what_is_not_written_is_told_the_oldest_first_whichever_rows_it_has() -> None:
    index = indexed()
    for at in range(1, 11):
        remove(index, at)
    for at in range(1, 11):  # in the rows that came free last
        add(index, at)
    index.rest()
    came = index.walks.added
    add(index, BLOCKS + 1)
    index.rest()
    assert unwritten(index, came) == [key(at) for at in [*range(11, BLOCKS + 1), *range(1, 11)]]
    assert unwritten(index)[-1] == key(BLOCKS + 1)
    assert not index._blocks.awake
    assert unwritten(indexed(framed=True)) == []


def test_what_is_not_written_keeps_its_order_when_numbers_begin_anew() -> None:
    index = Index()
    index.walks.added = ORDER_MAX - 2
    for at in range(1, 8):
        add(index, at)
    assert unwritten(index) == [key(at) for at in range(1, 8)]


def test_what_is_not_written_is_told_however_many_came_since() -> None:
    index = Index()
    add(index, 1)
    index.walks.added += (ORDER_MAX >> 1) + 5
    add(index, 2)
    assert unwritten(index) == [key(1), key(2)]
    assert unwritten(index, index.walks.added - 1) == [key(1)]


def test_what_leaves_or_comes_while_the_oldest_is_looked_for_is_left_out() -> None:
    index = indexed()
    steps = index.walks.unwritten()
    assert next(steps) == []
    remove(index, 5)
    add(index, BLOCKS + 1)  # in the same row
    assert [each for step in steps for each in step] == [
        key(at) for at in range(1, BLOCKS + 1) if at != 5
    ]


def test_a_tier_is_told_with_parents_and_wakes_nobody() -> None:
    index = indexed(50)
    index.add(filled([(5, 4096, False, True, 0)], 60))
    index.rest()
    rows = range(index.rows.end)
    here = [(key(at), key(at - 1)) for at in range(1, 51)]
    assert list(index.walks.parents(rows, framed=False)) == here
    assert list(index.walks.parents(rows, framed=True)) == [(key(60), key(59))]
    assert not index._blocks.awake
    awake = index.by_key(key(60)), index.by_key(key(50))
    assert list(index.walks.parents(rows, framed=False)) == here
    assert list(index.walks.parents(rows, framed=True)) == [(key(60), key(59))]
    del awake
