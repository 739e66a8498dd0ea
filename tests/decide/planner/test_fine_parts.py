"""What the planner knows of fine parts, example by example."""

from __future__ import annotations

import pytest

from kvstore.decide.index import StoredBlock
from kvstore.decide.planner import Planner, Reservation
from kvstore.model.block import Part, padded
from kvstore.model.outcome import Reason
from tests.decide.planner.lossy import BASES, BLOCKS, CHAINS, FINES, SPEC, record_nbytes, spans_of
from tests.decide.planner.spaces import CountingSpace, at_once

KEYS = CHAINS[0]
LOSSY = 1  # the first block that has fine parts: block 0 is exact
WRITER = 1


def planner_with_a_prefix() -> Planner:
    planner = Planner(CountingSpace(1 << 20), CountingSpace(1 << 20), now=lambda: 0.0)
    planner.eviction.fine_parts.resize(1 << 20)
    planner.index.register(SPEC)
    spans = spans_of(BASES, BLOCKS, fine=True)
    sizes = [record_nbytes(span.part, i, WRITER) for span in spans for i in range(BLOCKS)]
    placed = at_once(planner.puts.place(SPEC.id, KEYS, spans, sizes=sizes))
    reservation = Reservation(SPEC.id, KEYS, 0, None, spans, placed.refused)
    at_once(planner.puts.commit(reservation, placed.held, [WRITER] * len(placed.held)))
    return planner


def write_all(planner: Planner) -> None:
    file = planner._ledger._file
    assert file is not None
    for number, write in enumerate(planner.writes.take(1 << 30)):
        sizes = tuple(record.nbytes for record in write.stored)
        extent = file.allocate(sum(map(padded, sizes)))
        planner.writes.done(write, extent, 0, sizes, number)


def block_of(planner: Planner, index: int) -> StoredBlock:
    block = planner.index.by_key(KEYS[index])
    assert block is not None
    return block


def drop_fine(planner: Planner, index: int, part: Part) -> None:
    block = block_of(planner, index)
    record = block.record(part)
    assert record is not None
    assert planner.eviction.drop_fine(block, record)


def test_a_refined_match_looks_at_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for before every request, so it may not take longer than any other match."""
    planner = planner_with_a_prefix()

    def looked_at(*_: object) -> None:
        raise AssertionError("a match looks at a record")

    monkeypatch.setattr(StoredBlock, "record", looked_at)
    monkeypatch.setattr(StoredBlock, "records", property(looked_at))
    assert planner.match(SPEC.id, KEYS, refined=True) == planner.match(SPEC.id, KEYS)


@pytest.mark.parametrize("part", FINES)
def test_a_refined_match_ends_where_a_fine_part_is_missing(part: Part) -> None:
    planner = planner_with_a_prefix()
    write_all(planner)
    drop_fine(planner, BLOCKS - 1, part)
    refined = planner.match(SPEC.id, KEYS, refined=True)
    assert (refined.hit_blocks, refined.resident_blocks) == (BLOCKS, BLOCKS - 1)
    assert planner.match(SPEC.id, KEYS, refined=True, in_files=True).resident_blocks == BLOCKS
    assert planner.match(SPEC.id, KEYS).resident_blocks == BLOCKS


def test_a_lossy_block_that_leaves_the_files_is_counted_though_its_fine_part_had_a_frame() -> None:
    planner = planner_with_a_prefix()
    write_all(planner)
    planner.eviction.shed(1 << 30)
    assert planner.stored.resident == 0
    planner.eviction.evict_file(1 << 30)
    assert planner.stored.framed == 0
    assert planner.counts.evicted_file == BLOCKS
    assert planner.counts.left["file", Reason.EVICTED] == BLOCKS
