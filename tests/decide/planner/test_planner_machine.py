"""Any sequence of what a store asks, over tiny tiers: the books stay true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.decide.index import HeldSlot, StoredFrame
from kvstore.decide.planner import Check, Planner, Read, Reservation, Write, needed_spans
from kvstore.decide.policy import WriteBudget, policy_by_name
from kvstore.model.block import BlockKey, Part, Span, padded
from tests.decide.planner.spaces import (
    CHAINS,
    PARTS,
    RECORD,
    SPEC,
    CountingSpace,
    at_once,
)


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
            at_once(self.planner.admission.offer_all())
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
        keys, spans = chain[begin : begin + count], (Span(part, 0, count),)
        records = self.planner.find(SPEC.id, keys, spans)
        before = [record.frame if record is not None else None for record in records]
        frame = StoredFrame(extent, part, 0, (RECORD,) * count, self.sequence - age)
        self.planner.recovery.add(
            SPEC.id,
            frame,
            [(at, key, RECORD, checksum) for at, key in enumerate(keys)],
            first_block=begin,
            parent=chain[begin - 1] if begin else None,
        )
        for held, record in zip(before, self.planner.find(SPEC.id, keys, spans), strict=True):
            assert record is not None
            assert not record.dirty
            if held is not None and held.sequence >= frame.sequence:
                assert record.frame is held
            else:
                assert record.frame is frame
                assert record.checksum == checksum
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

    @rule()
    def rest(self) -> None:
        """Nobody can tell whether blocks have rested meanwhile."""
        self.planner.index.rest()

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
        assert self.planner.stored.resident == sum(b.resident_parts > 0 for b in blocks)
        assert self.planner.stored.framed == sum(b.framed_parts > 0 for b in blocks)
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
    """As the one that demotes, with a budget for a part of it. Parents may be wrong."""

    write_budget = 20

    @rule(at=st.integers(0, 3), parent=st.integers(0, 3))
    def put_after_any(self, at: int, parent: int) -> None:
        """Put a block after itself, or another one that may come after it."""
        spans = (Span(PARTS[0], 0, 1),)
        key, after = CHAINS[0][at], CHAINS[0][parent]
        placement = at_once(self.planner.puts.place(SPEC.id, [key], spans, after))
        reservation = Reservation(SPEC.id, [key], at, after, spans, placement.refused)
        with self.planner.pinned([held for held in placement.held if held is not None]):
            at_once(self.planner.puts.commit(reservation, placement.held, [1]))
        self.deleted -= {block.key for block in self.planner.index}


TestDemotingBudget = DemotingBudgetMachine.TestCase


TestDemotingBudget.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


TestBudget = BudgetMachine.TestCase


TestBudget.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
