"""What the planner decides, example by example."""

from __future__ import annotations

import pytest

from kvstore.decide.planner import Planner, Reservation
from kvstore.decide.planner.reads import LARGE_LOAD_NBYTES
from kvstore.decide.planner.writes import RETRY_RECORDS
from kvstore.decide.policy import WriteBudget
from kvstore.model.block import BlockKey, Part, Span
from tests.decide.planner.spaces import (
    CHAINS,
    PARTS,
    RECORD,
    SPEC,
    CountingSpace,
    Node,
    at_once,
    chain_of,
    found,
    resident,
)
from tests.decide.planner.test_planner_machine import PlannerMachine


def test_a_dirty_record_is_never_evicted() -> None:
    node = Node(dram_records=4)
    assert node.put(CHAINS[0][:4]) == 0
    assert node.put(CHAINS[1][:4]) == 4
    node.write_all()
    assert node.put(CHAINS[1][:4]) == 0


def test_room_is_given_to_the_start_of_a_prefix() -> None:
    node = Node(dram_records=5)
    spans = tuple(Span(part, 0, 4) for part in PARTS)
    placement = at_once(node.planner.puts.place(SPEC.id, CHAINS[0][:4], spans))
    by_block = [[placement.held[part * 4 + i] is not None for part in range(3)] for i in range(4)]
    assert by_block == [[True] * 3, [True, True, False], [False] * 3, [False] * 3]
    assert placement.refused == 7


def test_runs_are_consecutive_blocks_of_one_prefix_and_bounded() -> None:
    node = Node(dram_records=100)
    node.put(chain_of(40))
    node.put(CHAINS[0][:3])
    assert [len(write.blocks) for write in node.write_all()] == [16, 16, 8, 3]


def test_reads_come_in_prefix_order_over_all_parts_and_in_bounded_pieces() -> None:
    node = Node(dram_records=24)
    chain = chain_of(8)
    for part in PARTS:
        node.put(chain, part)
    assert [len(write.blocks) for write in node.write_all()] == [8, 8, 8]
    node.put(chain_of(40)[8:32])  # 24 others take the arena
    node.write_all()
    spans = tuple(Span(part, 0, 8) for part in PARTS)
    for first_alone, pieces in (
        (True, ([0], [1, 2, 3], [4, 5, 6], [7])),
        (False, ([0, 1, 2], [3, 4, 5], [6, 7])),
    ):
        reads = list(node.planner.reads.plan(SPEC.id, chain, spans, first_alone=first_alone))
        assert [(list(read.positions), read.frame.part) for read in reads] == [
            (positions, part) for positions in pieces for part in PARTS
        ]
        for read in reads:
            bad = read.positions if first_alone else []  # unread, it is asked for again
            node.planner.reads.done(read, bad, corrupt=False)
    assert node.planner.match(SPEC.id, chain).resident_blocks == 8


def test_reads_that_nobody_waits_for_any_more_give_back_what_they_took() -> None:
    node = Node(dram_records=8)
    chain = chain_of(8)
    node.put(chain)
    node.write_all()
    node.put(chain_of(40)[8:16])  # 8 others take the arena
    node.write_all()
    reads = node.planner.reads.plan(SPEC.id, chain, (Span(PARTS[0], 0, 8),))
    first = next(reads)
    reads.close()
    assert list(first.positions) == [0, 1, 2]
    records = node.planner.find(SPEC.id, chain, (Span(PARTS[0], 0, 8),))
    assert [record is not None and record.loading is not None for record in records] == (
        [True] * 3 + [False] * 5
    )
    node.planner.reads.done(first, [], corrupt=False)
    assert node.put(chain_of(60)[40:48]) == 0, "no slot stayed pinned"


def test_a_rotten_record_is_written_anew_from_the_arena_or_forgotten() -> None:
    node = Node(dram_records=4)
    node.put(chain_of(4))
    node.write_all()
    assert node.planner.checks.next(0.0) is None, "what was just written is not due"
    check = node.planner.checks.next(1.0)
    assert check is not None
    assert list(check.positions) == [0, 1, 2, 3]
    node.planner.checks.done(check, [1])
    assert [len(write.blocks) for write in node.write_all()] == [1]
    assert [block.framed_parts for block in node.planner.index] == [1] * 4
    node.put(CHAINS[0][:4])  # the arena is needed: now the frames hold the only copies
    node.write_all()
    for _ in range(2):
        check = node.planner.checks.next(1.0)
        assert check is not None
        node.planner.checks.done(check, [0])
    assert node.planner.find(SPEC.id, chain_of(4), (Span(PARTS[0], 0, 4),))[:2] == [None, None]


def test_the_tail_leaves_the_file_tier_first_and_a_run_leaves_whole() -> None:
    node = Node(dram_records=100)
    node.put(chain_of(32))
    node.write_all()
    node.planner.touch(chain_of(32))
    assert node.planner.eviction.evict_file(1) == 16 * RECORD
    assert [block.framed_parts for block in node.planner.index] == [1] * 16 + [0] * 16


def test_a_block_stored_twice_is_kept_once() -> None:
    node = Node(dram_records=8)
    spans = (Span(Part(0, 0), 0, 2),)
    first = at_once(node.planner.puts.place(SPEC.id, CHAINS[0][:2], spans))
    second = at_once(node.planner.puts.place(SPEC.id, CHAINS[0][:2], spans))
    reservation = Reservation(SPEC.id, CHAINS[0][:2], 0, None, spans, 0)
    assert at_once(node.planner.puts.commit(reservation, first.held, [1, 1]))[1] == 0
    assert at_once(node.planner.puts.commit(reservation, second.held, [1, 1]))[1] == 2


def test_without_a_file_tier_eviction_loses_and_says_so() -> None:
    planner = Planner(CountingSpace(2 * RECORD), None, now=lambda: 0.0)
    planner.index.register(SPEC)
    for chain in CHAINS[:2]:
        spans = (Span(Part(0, 0), 0, 2),)
        placement = at_once(planner.puts.place(SPEC.id, chain[:2], spans))
        reservation = Reservation(SPEC.id, chain[:2], 0, None, spans, 0)
        at_once(planner.puts.commit(reservation, placement.held, [1, 1]))
    assert planner.counts.lost == 2
    assert planner.match(SPEC.id, CHAINS[0]).hit_blocks == 0


def test_a_large_batch_is_placed_in_steps_and_given_up_between_them_it_keeps_nothing() -> None:
    dram = CountingSpace(1000 * RECORD)
    planner = Planner(dram, None, now=lambda: 0.0)
    planner.index.register(SPEC)
    keys = chain_of(200)
    steps = planner.puts.place(SPEC.id, keys, (Span(Part(0, 0), 0, 200),))
    next(steps)
    assert 0 < len(dram.live) < 200
    steps.close()
    assert not dram.live


def test_beyond_the_write_budget_nothing_is_begun_and_what_is_goes_on_when_there_is_more() -> None:
    machine = PlannerMachine()
    now = 0.0
    budget = WriteBudget(48 * 2 * RECORD, lambda: now)  # half an hour of it is two records
    machine.planner = Planner(machine.dram, machine.file, now=lambda: now, write_budget=budget)
    machine.planner.index.register(SPEC)
    first, second, _ = CHAINS

    def written() -> set[BlockKey]:
        writes = machine.planner.writes.take(1 << 20)
        return {block.key for write in writes for block in write.blocks}

    machine.put(first, 0, 2, {Part(0, 0)})
    machine.put(second, 0, 2, {Part(0, 0)})
    assert written() == set(first[:2])
    assert machine.planner.counts.unwritten == 2
    now = 3600.0
    machine.put(second, 2, 1, {Part(0, 0)})
    assert written() == set(), "its start is not written"
    machine.put(first, 2, 1, {Part(0, 0)})
    machine.planner.touch(second[:3])
    assert written() == {*first[2:3], *second[:3]}
    assert machine.planner.counts.unwritten == 3


def test_on_demotion_a_prefix_is_admitted_from_its_start_though_its_end_is_written_first() -> None:
    planner = Planner(
        CountingSpace(24 * RECORD),
        CountingSpace(40 * RECORD),
        now=lambda: 0.0,
        write_budget=WriteBudget(48 * 20 * RECORD, lambda: 0.0),
        write_on_demotion=True,
    )
    planner.index.register(SPEC)
    keys, spans = CHAINS[0][:12], (Span(PARTS[0], 0, 12),)
    placement = at_once(planner.puts.place(SPEC.id, keys, spans))
    reservation = Reservation(SPEC.id, keys, 0, None, spans, placement.refused)
    at_once(planner.puts.commit(reservation, placement.held, [1] * 12))

    def written() -> list[BlockKey]:
        return [block.key for write in planner.writes.take(1 << 20) for block in write.blocks]

    planner.eviction.write_ahead(RECORD)
    assert written() == keys[11:]
    at_once(planner.admission.offer_all())
    assert written() == keys[:11]
    assert planner.counts.unwritten == 0


def test_what_failed_is_queued_again_a_few_records_in_a_step() -> None:
    node = Node(dram_records=700)
    node.put(chain_of(700))
    for write in node.planner.writes.take(1 << 40):
        node.planner.writes.failed(write)
    assert node.planner.dirty.failed == 700
    left = []
    for _ in node.planner.writes.retry_failed():
        left.append(node.planner.dirty.failed)
    assert left == [700 - RETRY_RECORDS, 700 - 2 * RETRY_RECORDS, 0]
    assert sum(len(write.blocks) for write in node.write_all()) == 700


def test_what_is_not_durable_yet_is_as_soon_as_the_same_bytes_are_found() -> None:
    node = Node(dram_records=4)
    node.put(chain_of(4))
    frame = found(node, chain_of(4), 7, sequence=1)
    assert node.planner.dirty.count == 0
    assert node.write_all() == []
    assert resident(node, chain_of(4)) == 4
    assert node.file.live == {frame.extent}


def test_the_durable_copy_counts_of_two_that_differ_and_the_slot_of_the_other_is_free() -> None:
    node = Node(dram_records=4)
    node.put(chain_of(4))
    (write,) = node.planner.writes.take(1 << 40)
    frame = found(node, chain_of(4), 8, sequence=1)
    extent = node.file.allocate(write.nbytes)
    node.planner.writes.done(write, extent, 0, (RECORD,) * 4, 2)
    assert node.file.live == {frame.extent}, "what was being written is nobody's"
    assert resident(node, chain_of(4)) == 0
    assert node.put(CHAINS[0][:4]) == 0


def test_a_rotten_copy_that_is_being_read_does_not_cost_the_newer_one_found_meanwhile() -> None:
    node = Node(dram_records=4)
    found(node, chain_of(4), 7, sequence=1)
    (first, second) = node.planner.reads.plan(SPEC.id, chain_of(4), (Span(PARTS[0], 0, 4),))
    newer = found(node, chain_of(4), 7, sequence=2)
    node.planner.reads.done(first, list(first.positions), corrupt=True)
    node.planner.reads.done(second, [], corrupt=False)
    assert node.file.live == {newer.extent}
    assert len(newer.blocks) == 4
    assert resident(node, chain_of(4)) == 1
    assert found(node, chain_of(4), 7, sequence=1).blocks == {}
    assert node.file.live == {newer.extent}


@pytest.mark.parametrize("corrupt", [False, True])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_is_read_of_a_record_that_is_gone_meanwhile_is_nobodys(
    how: str, *, corrupt: bool
) -> None:
    node = Node(dram_records=3)
    keys, spans = chain_of(3), (Span(PARTS[0], 0, 3),)
    found(node, keys, 7, sequence=1)
    (read,) = node.planner.reads.plan(SPEC.id, keys, spans)
    newer = found(node, keys, 8, sequence=2) if how == "replaced" else None
    if newer is None:
        node.planner.delete(SPEC.id, keys)
    node.planner.reads.done(read, read.positions if corrupt else [], corrupt=corrupt)
    records = node.planner.find(SPEC.id, keys, spans)
    assert [record and record.checksum for record in records] == [8 if newer else None] * 3
    assert resident(node, keys) == 0
    assert node.file.live == ({newer.extent} if newer else set())
    assert node.put(CHAINS[0][:3]) == 0, "every slot is free"


def test_what_the_arena_has_of_a_lost_disk_is_written_to_another_one() -> None:
    node = Node(dram_records=4)
    node.put(chain_of(6)[:4])
    node.write_all()
    found(node, chain_of(6), 7, sequence=2)  # of two blocks, files have the only copy
    at_once(node.planner.recovery.withdraw(lambda _: True))
    assert not node.file.live
    assert [block.key for write in node.write_all() for block in write.blocks] == chain_of(6)[:4]
    assert [block.framed_parts for block in node.planner.index] == [1] * 4
    assert node.planner.dirty.settled(node.planner.dirty.last)


def test_room_on_a_disk_is_not_paid_for_by_another_that_has_nothing_newer() -> None:
    node = Node(dram_records=100)
    for chain in CHAINS:
        node.put(chain[:4])
        node.write_all()
    assert (
        node.planner.eviction.evict_file(RECORD, lambda extent: extent.offset >= 40 * RECORD) == 0
    )
    assert len(node.file.live) == 3
    second = sorted(node.file.live, key=lambda place: place.offset)[1]
    assert node.planner.eviction.evict_file(RECORD, lambda extent: extent == second) == 4 * RECORD
    assert len(node.file.live) == 1, "what is older leaves with it"


def test_a_large_load_is_read_in_fewer_pieces() -> None:
    chain = chain_of(12)
    for nbytes, pieces in ((0, 4), (LARGE_LOAD_NBYTES - 1, 4), (LARGE_LOAD_NBYTES, 2)):
        node = Node(dram_records=12)
        found(node, chain, 7, 1)
        spans = (Span(PARTS[0], 0, 12),)
        reads = list(node.planner.reads.plan(SPEC.id, chain, spans, nbytes=nbytes))
        assert [len(read.blocks) for read in reads] == [12 // pieces] * pieces


def test_what_files_have_too_leaves_the_arena_with_the_same_counts_awake_or_at_rest() -> None:
    counts = []
    for rests in (False, True):
        node = Node(dram_records=8)
        first, second = CHAINS[0][:8], CHAINS[1][:8]
        assert node.put(first) == 0
        node.write_all()
        if rests:
            node.planner.index.rest()
        assert node.put(second) == 0
        assert resident(node, first) == 0
        hit = node.planner.match(SPEC.id, first)
        counted = node.planner.counts
        left = dict(counted.left)
        counts.append((counted.evicted_dram, counted.lost, left, hit, len(node.planner.index)))
    assert counts[0] == counts[1]
    assert counts[0][:2] == (8, 0)
