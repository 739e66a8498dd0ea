"""What the planner knows of fine parts, example by example."""

from __future__ import annotations

import pytest

from kvstore.decide.index import StoredBlock, StoredFrame
from kvstore.decide.planner import Planner, Reservation
from kvstore.model.block import Part, padded
from kvstore.model.outcome import Reason
from tests.decide.planner.lossy import (
    BASES,
    BLOCKS,
    CHAINS,
    FINES,
    SPEC,
    OnDisk,
    record_nbytes,
    spans_of,
)
from tests.decide.planner.spaces import CountingSpace, at_once

KEYS = CHAINS[0]
LOSSY = 1  # the first block that has fine parts: block 0 is exact
WRITER, ANOTHER = 1, 2


def planner_with_a_prefix(*, write_fine_parts: bool = True) -> Planner:
    planner = Planner(
        CountingSpace(1 << 20),
        CountingSpace(1 << 20),
        now=lambda: 0.0,
        write_fine_parts=write_fine_parts,
    )
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


def find(planner: Planner, part: Part, writer: int) -> StoredFrame:
    """Find a writer's record of the lossy block on a disk that is back."""
    file, nbytes = planner._ledger._file, record_nbytes(part, LOSSY, writer)
    assert file is not None
    there = OnDisk(
        part, 100, LOSSY, KEYS[LOSSY - 1], (nbytes,), ((0, KEYS[LOSSY], nbytes, writer),)
    )
    return there.index(planner, file.allocate(there.nbytes))


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


def test_a_base_of_another_writer_that_a_disk_has_costs_the_fine_part_of_the_one_before() -> None:
    planner = planner_with_a_prefix()
    block, writers = block_of(planner, LOSSY), dict.fromkeys((*BASES, *FINES), WRITER)
    find(planner, BASES[0], WRITER)
    assert {record.part: record.checksum for record in block.records} == writers
    find(planner, BASES[1], ANOTHER)
    del writers[FINES[1]]
    writers[BASES[1]] = ANOTHER
    assert {record.part: record.checksum for record in block.records} == writers


@pytest.mark.parametrize("kept", [True, False])
def test_of_a_lost_disk_fine_parts_are_written_to_another_one_if_files_keep_them(
    *, kept: bool
) -> None:
    planner = planner_with_a_prefix(write_fine_parts=kept)
    write_all(planner)
    for fine in FINES:
        find(planner, fine, WRITER)
    at_once(planner.recovery.withdraw(lambda _: True))
    written = {write.part for write in planner.writes.take(1 << 30)}
    assert written == {*BASES, *(FINES if kept else ())}
