"""Blocks that nobody uses rest in columns, and come back as they were."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide import resting
from kvstore.decide.changed import Changed
from kvstore.decide.index import HeldSlot, Index, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.rows import SPLIT_ROWS, STEP_ROWS, Rows
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Part, Slot, padded
from kvstore.testing.policy import key
from kvstore.testing.samples import sample_keys

SPEC = Namespace(16, (Group("all", 4096, shards=6),), ())
NUMBERS = st.integers(0, (1 << 64) - 1)
RECORDS = st.lists(
    st.tuples(
        NUMBERS, st.integers(1, 1 << 30), st.booleans(), st.booleans(), st.integers(0, 65535)
    ),
    min_size=1,
    max_size=6,
)


def filled(records: Sequence[tuple[int, int, bool, bool, int]], at: int = 7) -> StoredBlock:
    """Return a block with records: checksum, bytes, whether resident, in a frame, and where."""
    block = StoredBlock(key(at), SPEC.id, at, key(at - 1))
    for shard, (checksum, nbytes, resident, framed, position) in enumerate(records):
        record = StoredPart(Part(0, shard), nbytes, checksum)
        if resident:
            record.resident = HeldSlot(Slot(shard, 4096 * position, nbytes))
            record.resident.indexed = True
            block.resident_parts += 1
        if framed:
            record.frame = StoredFrame(None, record.part, 0, (nbytes,), shard)
            record.position = position
            block.framed_parts += 1
        block.add(record)
    block.refresh(SPEC)
    return block


def told(block: StoredBlock) -> list[Any]:
    """Return all that is known of a block, but for the objects that know it."""
    of_block = [getattr(block, name) for name in StoredBlock.__slots__ if name not in ("stored",)]
    of_records = [
        (
            record.part,
            record.nbytes,
            record.checksum,
            record.fine,
            record.resident and (record.resident.slot, record.resident.pins),
            record.resident and record.resident.indexed,
            record.frame and (record.frame.sequence, record.frame.part),
            record.position if record.frame else 0,
            record.dirty,
        )
        for record in block.records
    ]
    return [*of_block, *of_records]


def awake(index: Index) -> int:
    return len(index._blocks.awake)


@given(st.lists(RECORDS, min_size=1, max_size=5))
def test_a_block_that_rested_is_what_it_was(blocks: list[list[Any]]) -> None:
    index = Index()
    index.register(SPEC)
    before = []
    for at, records in enumerate(blocks):
        index.add(filled(records, at + 1))
        before.append(told(index.by_key(key(at + 1))))  # type: ignore[arg-type]
    masks = index.masks(SPEC.id, [key(at + 1) for at in range(len(blocks) + 1)])
    index.rest()
    assert awake(index) == 0
    assert len(index) == len(blocks)
    assert index.masks(SPEC.id, [key(at + 1) for at in range(len(blocks) + 1)]) == masks
    assert awake(index) == 0
    assert [told(block) for block in index] == before
    for block in list(index):
        index.remove(block)
    del block
    assert not len(index)
    assert index._blocks.shapes.count(None) == len(index._blocks.shapes)


def hold_block(block: StoredBlock) -> object:
    return block


def hold_records(block: StoredBlock) -> object:
    return block.records


def hold_record(block: StoredBlock) -> object:
    return block.records[-1]


def hold_slot(block: StoredBlock) -> object:
    return block.records[-1].resident


@pytest.mark.parametrize("records", [1, 2, 6])
@pytest.mark.parametrize("hold", [hold_block, hold_records, hold_record, hold_slot])
def test_what_somebody_holds_stays_the_same_object(hold: Any, records: int) -> None:
    index = Index()
    index.add(filled([(5, 4096, True, False, at) for at in range(records)]))
    held = hold(index.by_key(key(7)))
    if records == 1 and hold is hold_records:
        held = held[0]  # the tuple is made for whoever asks
    index.rest()
    assert awake(index) == 1
    block = index.by_key(key(7))
    assert block is not None
    assert held in (block, *block.records, block.records, *(r.resident for r in block.records))
    del block, held
    index.rest()
    assert awake(index) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda record: setattr(record, "dirty", 3),
        lambda record: setattr(record, "loading", HeldSlot(Slot(0, 0, 4096))),
        lambda record: setattr(record.resident, "pins", 1),
        lambda record: setattr(record, "checksum", 1 << 64),
        lambda record: setattr(record, "checksum", -1),
    ],
)
@pytest.mark.parametrize("records", [1, 3])
def test_what_is_under_way_or_has_no_room_in_a_row_stays_awake(change: Any, records: int) -> None:
    index = Index()
    index.add(filled([(5, 4096, True, False, at) for at in range(records)]))
    block = index.by_key(key(7))
    assert block is not None
    change(block.records[-1])
    before = told(block)
    del block
    index.rest()
    assert awake(index) == 1
    assert [told(each) for each in index] == [before]


def test_few_stay_awake_and_each_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "AWAKE_MAX", 10)
    monkeypatch.setattr(resting, "AWAKE_PEAK", 10)
    index, keys = Index(), sample_keys("many", 700)
    for at, each in enumerate(keys):
        index.add(StoredBlock(each, SPEC.id, at, keys[at - 1] if at else None))
        index.by_key(each).add(StoredPart(Part(0, 0), 4096, at))  # type: ignore[union-attr]
        record = index.by_key(each).record(Part(0, 0))  # type: ignore[union-attr]
        assert record is not None
        record.resident = HeldSlot(Slot(0, 4096 * at, 4096))
        del record
    assert awake(index) <= 10 + 1
    assert [block.block_index for block in index] == list(range(700))
    assert sorted(index.keys()) == sorted(keys)
    found = index.find(SPEC.id, keys)
    assert [block.key if block else None for block in found] == keys


def test_what_was_asked_for_rests_once_it_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "AWAKE_MAX", 10)
    monkeypatch.setattr(resting, "AWAKE_PEAK", 1000)
    index, keys = Index(), [key(number) for number in range(1, 701)]
    for number, each in enumerate(keys, 1):
        index.add(filled([(number % 9 + 1, 4096, True, False, 0)], number))
        assert index.by_key(each) is not None
    index.rest()
    found = index.find(SPEC.id, keys)
    assert awake(index) == 700, "no answer waits for that"
    index.settle(700)
    assert awake(index) == 700, "they are in use"
    del found
    index.settle(700)
    assert awake(index) == 10


def test_the_garbage_collector_has_no_more_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "AWAKE_MAX", 10)

    def grown(blocks: int) -> int:
        index = Index()
        gc.collect()
        before = len(gc.get_objects())
        for at in range(blocks):
            index.add(filled([(5, 4096, True, False, at)], at + 1))
        index.rest()
        gc.collect()
        return len(gc.get_objects()) - before

    assert grown(2000) < grown(200) + 900  # with an object a block: 1800; others come and go


def test_rows_are_used_again_and_split_tables_have_all() -> None:
    rows = Rows()
    mine, theirs = rows.keeper(), rows.keeper()
    column, flags = rows.column("I"), rows.flags()
    keys = sample_keys("rows", 1000)
    for at, each in enumerate(keys):
        column[rows.keep(each, mine)] = at
    assert len(column) == len(flags) == len(rows) >= 1000
    row = rows.keep(keys[3], theirs)
    rows.drop(row, mine)
    assert rows.find(keys[3]) == row
    rows.drop(row, theirs)
    assert rows.find(keys[3]) == 0
    assert rows.keep(key(5), mine) == row
    late = rows.column("Q")
    assert len(late) == len(column)
    for number in range(SPLIT_ROWS + STEP_ROWS):
        rows.keep(BlockKey((1 << 32 | number).to_bytes(32, "big")), theirs)
    assert [column[rows.find(each)] for each in keys[4:]] == list(range(4, 1000))
    assert len(list(rows.kept(theirs))) == SPLIT_ROWS + STEP_ROWS
    assert len(list(rows.kept(mine))) == 1000
    rows.retire(theirs, ())
    sweeps = 1
    while rows.sweep(5000):
        sweeps += 1
    assert sweeps > SPLIT_ROWS // 5000
    assert not list(rows.kept(theirs))
    assert len({rows.find(each) for each in keys}) == 1000  # 0 for one of them
    assert rows.keeper() == theirs


def test_what_only_the_arena_has_is_found_among_those_that_rest() -> None:
    index = Index()
    for at in range(20):
        index.add(filled([(5, 4096, True, at % 3 == 0, at)], at + 1))
    index.rest()
    assert awake(index) == 0
    found = [each for some in index.walks.unwritten() for each in some]
    assert found == [key(at + 1) for at in range(20) if at % 3]
    assert awake(index) == 0


def test_a_namespace_finds_its_own_among_those_that_rest() -> None:
    index, other = Index(), NamespaceId(bytes(32))
    for at in range(20):
        block = filled([(5, 4096, True, False, at)], at + 1)
        block.namespace_id = other if at % 4 else SPEC.id
        index.add(block)
    del block
    index.rest()
    assert awake(index) == 0
    assert sorted(index.keys(SPEC.id)) == [key(at + 1) for at in range(0, 20, 4)]
    assert len(list(index.keys(other))) == 15
    assert awake(index) == 0


def test_who_announces_is_told_of_blocks_that_leave_while_they_rest() -> None:
    index, changed = Index(), Changed()
    index.changed = changed
    for at in range(1, 4):
        index.add(filled([(5, 4096, True, False, at)], at))
    gc.collect()
    index.rest()  # what is noted is held by nobody
    assert awake(index) == 0
    list(changed.take())
    assert index.take(key(2)) == Slot(0, 4096 * 2, 4096)
    assert awake(index) == 0
    assert list(changed.take()) == [(key(2), SPEC.id)]
    assert index.places(SPEC.id, [key(1), key(2)], 0) == bytes(2)  # of six shards there is one
    assert index.by_key(key(2)) is None
    assert awake(index) == 0


@given(NUMBERS, st.integers(1, 1 << 30), st.integers(0, 65535), st.integers(1, 3))
def test_a_block_that_leaves_the_arena_at_rest_is_as_if_it_had_left_it_awake(
    checksum: int, nbytes: int, position: int, shards: int
) -> None:
    spec = Namespace(16, (Group("all", 4096, shards=shards),), ())
    complete = int(shards == 1)
    found = []
    for rests in (False, True):
        index, changed = Index(), Changed()
        index.register(spec)
        index.changed = changed
        for at in range(1, 5):
            block = filled([(checksum, nbytes, True, True, position)], at)
            block.namespace_id = spec.id
            block.refresh(spec)
            index.add(block)
            index.namespaces.in_dram(spec.id, padded(nbytes), 0)
        if not rests:
            block = index.by_key(key(2)) or block
            block.records[0].resident = None
            block.resident_parts = 0
            index.namespaces.in_dram(spec.id, -padded(nbytes), 0)
            index.refresh(block)
        del block
        index.rest()
        assert awake(index) == 0
        if rests:
            assert index.demote(key(2)) == Slot(0, 4096 * position, nbytes)
        assert index.demote(key(2)) is None  # it has left
        assert awake(index) == 0
        assert list(changed.take()) == [(key(2), spec.id)]
        keys = [key(at) for at in range(1, 5)]
        here = [complete, 0, complete, complete]
        assert index.masks(spec.id, keys) == ([complete] * 4, here)
        namespace = index.namespaces.find(spec.id)
        assert namespace is not None
        found.append([namespace.dram_nbytes, *(told(index.by_key(each)) for each in keys)])  # type: ignore[arg-type]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "records",
    [
        [(5, 4096, True, False, 1)],
        [(5, 4096, False, True, 1)],
        [(5, 4096, True, True, 1), (6, 4096, True, True, 2)],
    ],
    ids=["nothing else has it", "it is not there", "of two records"],
)
def test_others_are_not_demoted_while_they_rest(records: list[Any]) -> None:
    index = Index()
    index.register(SPEC)
    index.add(filled(records))
    before = told(index.by_key(key(7)))  # type: ignore[arg-type]
    assert index.demote(key(7)) is None  # it is awake
    index.rest()
    assert index.demote(key(7)) is None
    assert awake(index) == 0
    assert told(index.by_key(key(7))) == before  # type: ignore[arg-type]


def test_a_block_of_a_namespace_that_nobody_has_told_is_looked_at() -> None:
    index = Index()
    block = filled([(5, 4096, True, True, 1)])
    block.refresh(None)
    index.add(block)
    del block
    index.rest()
    assert index.demote(key(7)) is None


@pytest.mark.parametrize("extent", [(1 << 16) - 1, 1 << 16, (1 << 28) - 1])
@pytest.mark.parametrize("records", [1, 2])
def test_a_block_rests_in_an_extent_however_many_there_were_before(
    extent: int, records: int
) -> None:
    index = Index()
    index.register(SPEC)
    block = StoredBlock(key(1), SPEC.id, 1, key(0))
    for shard in range(records):
        record = StoredPart(Part(0, shard), 4096, 7)
        record.resident = HeldSlot(Slot(extent, (1 << 48) - 4096, 4096))
        record.resident.indexed = True
        block.resident_parts += 1
        block.add(record)
    del record
    index.add(block)
    before = told(block)
    del block
    index.rest()
    assert awake(index) == 0
    assert [told(block) for block in index] == [before]
