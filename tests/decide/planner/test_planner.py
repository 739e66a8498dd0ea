"""Whatever order puts, evictions, promotions, failures and deletes come in, the books balance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import TypeVar, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.decide.index import HeldSlot, StoredFrame
from kvstore.decide.planner import Check, Planner, Read, Reservation, Steps, Write, needed_spans
from kvstore.decide.policy import WriteBudget, policy_by_name
from kvstore.model.block import BlockKey, Group, Namespace, Part, Slot, Span, padded
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


class PlannerMachine(RuleBasedStateMachine):
    policy = "lru"
    admission = "all"
    write_budget: int | None = None  # records an hour

    def __init__(self) -> None:
        super().__init__()
        self.dram = CountingSpace(24 * RECORD)
        self.file = CountingSpace(40 * RECORD)
        self.clock = 0.0
        budget = self.write_budget
        self.planner = Planner(
            self.dram,
            self.file,
            now=lambda: self.clock,
            dram_policy=policy_by_name(self.policy),
            file_policy=policy_by_name(self.policy),
            read_nbytes_max=3 * RECORD,
            write_on_demotion=self.admission == "demotion",
            write_on_second_use=self.admission == "second_use",
            write_budget=WriteBudget(24 * budget * RECORD, lambda: self.clock) if budget else None,
        )
        self.planner.index.register(SPEC)
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.checks: list[Check] = []
        self.leased: list[HeldSlot] = []
        self.deleted: set[BlockKey] = set()
        self.sequence = 10

    @rule(
        chain=st.sampled_from(CHAINS),
        begin=st.integers(0, 10),
        count=st.integers(1, 12),
        parts=st.sets(st.sampled_from(PARTS), min_size=1),
    )
    def put(self, chain: list[BlockKey], begin: int, count: int, parts: set[Part]) -> None:
        keys = chain[begin : begin + count]
        spans = tuple(Span(part, 0, len(keys)) for part in sorted(parts))
        placement = at_once(self.planner.puts.place(SPEC.id, keys, spans))
        parent = chain[begin - 1] if begin else None
        reservation = Reservation(SPEC.id, keys, begin, parent, spans, placement.refused)
        for held in placement.held:
            if held is not None:
                held.pins += 1
        at_once(self.planner.puts.commit(reservation, placement.held, [1] * len(placement.held)))
        for held in placement.held:
            if held is not None:
                held.pins -= 1
                self.planner.unpin(held)
        self.deleted -= {block.key for block in self.planner.index}

    @rule(chain=st.sampled_from(CHAINS), count=st.integers(1, 24))
    def end(self, chain: list[BlockKey], count: int) -> None:
        self.planner.end(chain[:count])

    @rule(nbytes=st.integers(1, 20 * RECORD), everything=st.booleans())
    def demote(self, nbytes: int, everything: bool) -> None:
        if everything:
            self.planner.admission.offer_all()
        else:
            self.planner.eviction.write_ahead(nbytes)

    @rule(nbytes=st.integers(1, 20 * RECORD))
    def take_writes(self, nbytes: int) -> None:
        self.writes += self.planner.writes.take(nbytes)

    @precondition(lambda self: self.writes)
    @rule(ok=st.booleans())
    def finish_write(self, ok: bool) -> None:
        write = self.writes.pop(0)
        for block, following in zip(write.blocks, write.blocks[1:], strict=False):
            assert following.parent == block.key
        extent = self.file.allocate(write.nbytes)
        if extent is None:
            self.planner.eviction.evict_file(write.nbytes)
            extent = self.file.allocate(write.nbytes)
        if extent is None or not ok:
            if extent is not None:
                self.file.free(extent)
            self.planner.writes.failed(write)
        else:
            self.sequence += 1
            sizes = (RECORD,) * len(write.blocks)
            self.planner.writes.done(write, extent, 0, sizes, self.sequence)

    @rule(
        chain=st.sampled_from(CHAINS),
        blocks=st.tuples(st.integers(0, 10), st.integers(1, 6)),
        part=st.sampled_from(PARTS),
        age=st.integers(0, 5),
        checksum=st.sampled_from([1, 1, 2]),
    )
    def find_on_disk(
        self, chain: list[BlockKey], blocks: tuple[int, int], part: Part, age: int, checksum: int
    ) -> None:
        begin, count = blocks
        extent = self.file.allocate(count * RECORD)
        if extent is None:
            return
        keys = chain[begin : begin + count]
        frame = StoredFrame(extent, part, 0, (RECORD,) * count, self.sequence - age)
        self.planner.recovery.add(
            SPEC.id,
            frame,
            [(at, key, RECORD, checksum) for at, key in enumerate(keys)],
            first_block=begin,
            parent=chain[begin - 1] if begin else None,
        )
        for record in self.planner.find(SPEC.id, keys, (Span(part, 0, count),)):
            assert record is not None
            assert record.frame is not None
            assert not record.dirty
            if record.frame is frame:
                assert record.checksum == checksum
            else:
                assert record.frame.sequence >= frame.sequence
        self.deleted -= set(keys)

    @rule(half=st.integers(0, 1))
    def lose_a_disk(self, half: int) -> None:
        at_once(
            self.planner.recovery.withdraw(lambda extent: extent.offset // (20 * RECORD) == half)
        )

    @rule(chain=st.sampled_from(CHAINS), first_alone=st.booleans())
    def start_reads(self, chain: list[BlockKey], first_alone: bool) -> None:
        hit = self.planner.match(SPEC.id, chain).hit_blocks
        spans = needed_spans(SPEC, hit)
        self.reads += self.planner.reads.plan(SPEC.id, chain, spans, first_alone=first_alone)

    @rule(chain=st.sampled_from(CHAINS), count=st.integers(0, 2))
    def start_reads_and_give_up(self, chain: list[BlockKey], count: int) -> None:
        hit = self.planner.match(SPEC.id, chain).hit_blocks
        with closing(self.planner.reads.plan(SPEC.id, chain, needed_spans(SPEC, hit))) as reads:
            self.reads += islice(reads, count)

    @precondition(lambda self: self.reads)
    @rule(bad=st.sets(st.integers(0, 15), max_size=2), corrupt=st.booleans())
    def finish_read(self, bad: set[int], corrupt: bool) -> None:
        self.planner.reads.done(self.reads.pop(0), sorted(bad), corrupt=corrupt)

    @rule()
    def start_check(self) -> None:
        check = self.planner.checks.next(float("inf"))
        if check is not None:
            self.checks.append(check)

    @precondition(lambda self: self.checks)
    @rule(bad=st.sets(st.integers(0, 15), max_size=2))
    def finish_check(self, bad: set[int]) -> None:
        self.planner.checks.done(self.checks.pop(0), sorted(bad))

    @rule(chain=st.sampled_from(CHAINS))
    def lease(self, chain: list[BlockKey]) -> None:
        hit = self.planner.match(SPEC.id, chain).resident_blocks
        for record in self.planner.find(SPEC.id, chain, needed_spans(SPEC, hit)):
            assert record is not None
            assert record.resident is not None
            record.resident.pins += 1
            self.leased.append(record.resident)
        self.planner.touch(chain[:hit])

    @precondition(lambda self: self.leased)
    @rule()
    def release(self) -> None:
        for held in self.leased:
            held.pins -= 1
            self.planner.unpin(held)
        self.leased.clear()

    @rule(chain=st.sampled_from(CHAINS), begin=st.integers(0, 11))
    def delete(self, chain: list[BlockKey], begin: int) -> None:
        self.planner.delete(SPEC.id, chain[begin:])
        self.deleted |= set(chain[begin:])

    @rule(nbytes=st.integers(1, 10 * RECORD))
    def evict_file(self, nbytes: int) -> None:
        self.planner.eviction.evict_file(nbytes)

    @invariant()
    def every_place_belongs_to_somebody(self) -> None:
        records = [r for block in self.planner.index for r in block.records]
        slots = {r.resident.slot for r in records if r.resident}
        slots |= {held.slot for held in self.leased}
        slots |= {held.slot for write in self.writes for held in write.held}
        slots |= {held.slot for read in self.reads for held in read.held}
        assert self.dram.live == slots
        extents = {r.frame.extent for r in records if r.frame}
        extents |= {read.extent for read in self.reads}
        extents |= {check.frame.extent for check in self.checks}
        assert self.file.live == extents

    @invariant()
    def counts_and_masks_are_true(self) -> None:
        blocks = list(self.planner.index)
        assert all(block.records for block in blocks)
        for block in blocks:
            groups = [{r.part.shard for r in block.records if r.part.group == g} for g in (0, 1)]
            assert block.complete == (len(groups[0]) == 1) | (len(groups[1]) == 2) << 1
            assert block.resident_parts == sum(r.resident is not None for r in block.records)
            assert block.framed_parts == sum(r.frame is not None for r in block.records)
            assert all(r.resident or r.frame for r in block.records)
        dirty = [r for b in blocks for r in b.records if r.dirty]
        assert self.planner.dirty.nbytes == RECORD * len(dirty)
        assert self.planner.resident_blocks == sum(b.resident_parts > 0 for b in blocks)
        assert self.planner.framed_blocks == sum(b.framed_parts > 0 for b in blocks)
        newest = max((r.dirty for r in dirty), default=0)
        assert self.planner.dirty.settled(self.planner.dirty.last) == (newest == 0)
        frames = [(r.frame, r.position) for b in blocks for r in b.records if r.frame]
        resident = [r for b in blocks for r in b.records if r.resident]
        for use in (*self.planner.index.namespaces, *self.planner.index.namespaces.models):
            assert use.blocks == len(blocks)
            assert use.dram_nbytes == sum(padded(r.nbytes) for r in resident)
            assert use.file_nbytes == sum(padded(f.stored_nbytes[at]) for f, at in frames)

    @invariant()
    def deleted_blocks_stay_away(self) -> None:
        assert not self.deleted & {block.key for block in self.planner.index}


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class DemotingMachine(PlannerMachine):
    """As above, with a policy that learns, and nothing written before it has to leave."""

    policy = "hz"
    admission = "demotion"


TestDemoting = DemotingMachine.TestCase
TestDemoting.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class SecondUseMachine(PlannerMachine):
    """As above, with nothing written before it is used again."""

    admission = "second_use"


TestSecondUse = SecondUseMachine.TestCase
TestSecondUse.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class BudgetMachine(PlannerMachine):
    """As above, with a budget for a part of what is put: nothing is queued to be written unless
    what is before it in its prefix is written, or will be."""

    write_budget = 20

    @rule(minutes=st.integers(1, 30))
    def wait(self, minutes: int) -> None:
        self.clock += 60.0 * minutes

    @rule(
        chain=st.sampled_from(CHAINS),
        begin=st.integers(0, 10),
        count=st.integers(1, 12),
        parts=st.sets(st.sampled_from(PARTS), min_size=1),
    )
    def put(self, chain: list[BlockKey], begin: int, count: int, parts: set[Part]) -> None:
        with self.nothing_without_its_start():
            super().put(chain, begin, count, parts)

    @rule(chain=st.sampled_from(CHAINS), count=st.integers(1, 24))
    def use(self, chain: list[BlockKey], count: int) -> None:
        with self.nothing_without_its_start():
            self.planner.touch(chain[:count])

    @rule(nbytes=st.integers(1, 20 * RECORD), everything=st.booleans())
    def demote(self, nbytes: int, everything: bool) -> None:
        with self.nothing_without_its_start():
            super().demote(nbytes, everything)

    @contextmanager
    def nothing_without_its_start(self) -> Iterator[None]:
        dirty = {id(r) for block in self.planner.index for r in block.records if r.dirty}
        kept = {block.key for block in self.planner.index if self.is_kept(block.key)}
        yield
        for block in self.planner.index:
            if any(r.dirty and id(r) not in dirty for r in block.records):
                start = block.parent is None or self.is_kept(block.parent)
                assert start or block.key in kept

    def is_kept(self, key: BlockKey) -> bool:
        block = self.planner.index.by_key(key)
        return block is not None and any(r.dirty or r.frame for r in block.records)


class DemotingBudgetMachine(DemotingMachine):
    """As the one that demotes, with a budget for a part of it."""

    write_budget = 20


TestDemotingBudget = DemotingBudgetMachine.TestCase
TestDemotingBudget.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


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
    planner.admission.offer_all()
    assert written() == keys[:11]
    assert planner.counts.unwritten == 0


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
