"""Any sequence of what a store asks of a lossy namespace: parts of one writer stay together, what
was durable is found again, and the books add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import Check, Planner, Read, Reservation, Write, needed_spans
from kvstore.decide.policy import policy_by_name
from kvstore.model.block import BlockKey, Part, Slot, padded
from tests.decide.planner.lossy import (
    BASE,
    BASES,
    BLOCKS,
    CHAINS,
    EXACT_MAX,
    FINES,
    PAGE,
    SPEC,
    WRITERS,
    Item,
    OnDisk,
    base_nbytes,
    durable_bases,
    fine_with_bases,
    record_nbytes,
    records,
    spans_of,
)
from tests.decide.planner.spaces import CountingSpace, at_once

chains = st.integers(0, len(CHAINS) - 1)
counts = st.sampled_from([1, 2, BLOCKS])
writers = st.sampled_from(WRITERS)
base_parts = st.sampled_from([BASES, BASES, BASES[:1], BASES[1:], BASES[2:]])


class FineMachine(RuleBasedStateMachine):
    admission = "all"
    policy = "lru"
    write_fine_parts = True

    def __init__(self) -> None:
        super().__init__()
        self.file = CountingSpace(60 * PAGE)
        self.disk: dict[Slot, OnDisk] = {}
        self.sequence = 10
        self.owed: set[Item] = set()  # bases that were durable, and were not given up since
        self.deleted: set[BlockKey] = set()
        self.buried: dict[BlockKey, int] = {}  # key -> number of the delete
        self._start()

    def _start(self) -> None:
        self.dram = CountingSpace(48 * PAGE)
        self.planner = Planner(
            self.dram,
            self.file,
            now=lambda: 0.0,
            dram_policy=policy_by_name(self.policy),
            file_policy=policy_by_name(self.policy),
            read_nbytes_max=3 * EXACT_MAX,
            write_on_demotion=self.admission == "demotion",
            write_on_second_use=self.admission == "second_use",
            write_fine_parts=self.write_fine_parts,
        )
        self.planner.eviction.fine_parts.resize(48 * PAGE)
        self.planner.index.register(SPEC)
        self.puts: list[tuple[Reservation, tuple[HeldSlot | None, ...], int]] = []
        self.writes: list[tuple[int, Write]] = []  # by the number they were begun with
        self.reads: list[Read] = []
        self.checks: list[Check] = []
        self.leased: list[HeldSlot] = []

    # ---- puts --------------------------------------------------------------------------------

    @rule(
        chain=chains,
        begin=st.integers(0, BLOCKS - 1),
        count=counts,
        bases=base_parts,
        fine=st.booleans(),
        writer=writers,
        refined=st.booleans(),
        now=st.booleans(),
    )
    def put(
        self,
        *,
        chain: int,
        begin: int,
        count: int,
        bases: list[Part],
        fine: bool,
        writer: int,
        refined: bool,
        now: bool,
    ) -> None:
        """now: committed at once; else others may be in between."""
        keys = CHAINS[chain][begin : begin + count]
        spans = spans_of(bases, len(keys), fine=fine)
        sizes = [
            record_nbytes(span.part, begin + i, writer) for span in spans for i in range(len(keys))
        ]
        placed = at_once(
            self.planner.puts.place(SPEC.id, keys, spans, sizes=sizes, refined=refined)
        )
        for held in placed.held:
            if held is not None:
                held.pins += 1
        parent = CHAINS[chain][begin - 1] if begin else None
        reservation = Reservation(
            SPEC.id, keys, begin, parent, spans, placed.refused, refined=refined
        )
        self.puts.append((reservation, placed.held, writer))
        if now:
            self._end_put(len(self.puts) - 1, ok=True)

    @precondition(lambda self: self.puts)
    @rule(ok=st.booleans())
    def end_put(self, ok: bool) -> None:
        self._end_put(0, ok=ok)

    def _end_put(self, at: int, *, ok: bool) -> None:
        reservation, slots, writer = self.puts.pop(at)
        if ok:
            at_once(self.planner.puts.commit(reservation, slots, [writer] * len(slots)))
            self.deleted -= {block.key for block in self.planner.index}
        for held in slots:
            if held is not None:
                held.pins -= 1
                self.planner.unpin(held)

    # ---- writes, reads, checks ---------------------------------------------------------------

    @rule(nbytes=st.integers(1, 30 * PAGE), everything=st.booleans())
    def take_writes(self, nbytes: int, everything: bool) -> None:
        if everything:
            at_once(self.planner.admission.offer_all())
        self._take_writes(nbytes)

    def _take_writes(self, nbytes: int) -> None:
        for write in self.planner.writes.take(nbytes):
            self.sequence += 1
            self.writes.append((self.sequence, write))

    @precondition(lambda self: self.writes)
    @rule(ok=st.booleans(), last=st.booleans())
    def finish_write(self, ok: bool, last: bool) -> None:
        self._finish_write(-1 if last else 0, ok=ok)

    def _finish_write(self, at: int, *, ok: bool) -> None:
        number, write = self.writes.pop(at)
        assert self.write_fine_parts or write.part in BASES
        blocks = [
            (i, block.key, record.nbytes, record.checksum)
            for i, (block, record) in enumerate(zip(write.blocks, write.stored, strict=True))
        ]
        first = write.blocks[0]
        sizes = tuple(record.nbytes for record in write.stored)
        frame = OnDisk(write.part, number, first.block_index, first.parent, sizes, tuple(blocks))
        extent = self.file.allocate(frame.nbytes)
        if extent is None:
            with self.giving_up():
                self.planner.eviction.evict_file(frame.nbytes)
            extent = self.file.allocate(frame.nbytes)
        if extent is None or not ok:
            if extent is not None:
                self.file.free(extent)
            self.planner.writes.failed(write)
            return
        self.planner.writes.done(write, extent, 0, frame.sizes, number)
        left = tuple(each for each in blocks if self.buried.get(each[1], 0) < number)
        if left:
            self.disk[extent] = frame._replace(blocks=left)
        self.owed |= durable_bases(self.planner)

    @rule(failing=st.sampled_from(["", "", "fine", "all"]))
    def write_all(self, failing: str) -> None:
        """Write what waits, perhaps but for fine parts."""
        at_once(self.planner.admission.offer_all())
        self._take_writes(1 << 30)
        while self.writes:
            is_fine = self.writes[0][1].part in FINES
            self._finish_write(0, ok=failing != "all" and not (failing and is_fine))

    @rule()
    def write_fine_parts_alone(self) -> None:
        """Let the daemon be killed before their bases are written."""
        self._take_writes(1 << 30)
        for write in [write for write in self.writes if write[1].part in FINES]:
            self._finish_write(self.writes.index(write), ok=True)

    @rule(chain=chains)
    def read_all(self, chain: int) -> None:
        """Read what files have of a prefix, fine parts behind their bases."""
        for fine in (False, True):
            spans = spans_of(BASES, BLOCKS, fine=fine)
            self.reads += self.planner.reads.plan(SPEC.id, CHAINS[chain], spans)
            while self.reads:
                self._finish_read(set(), corrupt=True)

    @rule(
        chain=chains,
        begin=st.integers(0, BLOCKS - 1),
        count=counts,
        base=st.sampled_from(range(len(BASES))),
        writer=writers,
        fine_writer=st.sampled_from([None, *WRITERS]),
        age=st.integers(0, 5),
    )
    def find_on_disk(
        self,
        *,
        chain: int,
        begin: int,
        count: int,
        base: int,
        writer: int,
        fine_writer: int | None,
        age: int,
    ) -> None:
        """Find bases, and fine parts which may be another writer's."""
        self._find(BASES[base], writer, chain, range(begin, begin + count), age)
        if fine_writer is not None:
            self._find(FINES[base], fine_writer, chain, range(begin, begin + count), age)

    def _find(self, part: Part, writer: int, chain: int, found: range, age: int) -> None:
        keys = CHAINS[chain][found.start : found.stop]
        if part in FINES and any(base_nbytes(block, writer) != BASE for block in found):
            return  # an exact block has none
        blocks = tuple(
            (i, key, record_nbytes(part, found[i], writer), writer) for i, key in enumerate(keys)
        )
        parent = CHAINS[chain][found.start - 1] if found.start else None
        sizes = tuple(nbytes for _, _, nbytes, _ in blocks)
        frame = OnDisk(part, self.sequence - age, found.start, parent, sizes, blocks)
        extent = self.file.allocate(frame.nbytes)
        if extent is not None:
            self.disk[extent] = frame
            frame.index(self.planner, extent)
            self.owed |= durable_bases(self.planner)
            self.deleted -= set(keys)

    @rule(half=st.integers(0, 1))
    def lose_a_disk(self, half: int) -> None:
        with self.giving_up():
            at_once(
                self.planner.recovery.withdraw(lambda extent: extent.offset // (30 * PAGE) == half)
            )

    @rule(chain=chains, refined=st.booleans(), fine=st.booleans(), first_alone=st.booleans())
    def start_reads(self, chain: int, refined: bool, fine: bool, first_alone: bool) -> None:
        hit = self.planner.match(SPEC.id, CHAINS[chain], refined=refined).hit_blocks
        spans = needed_spans(SPEC, hit, fine=fine or refined)
        self.reads += self.planner.reads.plan(
            SPEC.id, CHAINS[chain], spans, first_alone=first_alone
        )

    @precondition(lambda self: self.reads)
    @rule(bad=st.sets(st.integers(0, 15), max_size=2), corrupt=st.booleans())
    def finish_read(self, bad: set[int], corrupt: bool) -> None:
        self._finish_read(bad, corrupt=corrupt)

    def _finish_read(self, bad: set[int], *, corrupt: bool) -> None:
        read = self.reads.pop(0)
        if corrupt:  # else nothing arrived of it
            bad |= set(self.planner.reads.unpaired(read, [r.checksum for r in read.stored]))
        else:
            bad = set(read.positions)
        with self.giving_up():
            self.planner.reads.done(read, sorted(bad), corrupt=corrupt)

    @rule()
    def start_check(self) -> None:
        check = self.planner.checks.next(float("inf"))
        if check is not None:
            self.checks.append(check)

    @precondition(lambda self: self.checks)
    @rule(bad=st.sets(st.integers(0, 15), max_size=2))
    def finish_check(self, bad: set[int]) -> None:
        with self.giving_up():
            self.planner.checks.done(self.checks.pop(0), sorted(bad))

    @rule(at=st.integers(0, 200))
    def find_wrong_in_arena(self, at: int) -> None:
        held = [(b, r) for b, r in records(self.planner) if r.resident is not None]
        if held:
            block, record = held[at % len(held)]
            assert record.resident is not None
            self.planner.checks.resident_is_wrong(block, record, record.resident)

    # ---- the others --------------------------------------------------------------------------

    @rule(chain=chains, refined=st.booleans())
    def lease(self, chain: int, refined: bool) -> None:
        match = self.planner.match(SPEC.id, CHAINS[chain], refined=refined)
        spans = needed_spans(SPEC, match.resident_blocks, fine=True)
        for record in self.planner.find(SPEC.id, CHAINS[chain], spans):
            if record is None or record.resident is None:
                continue
            record.resident.pins += 1
            self.leased.append(record.resident)
        self.planner.touch(CHAINS[chain][: match.resident_blocks])

    @precondition(lambda self: self.leased)
    @rule()
    def release(self) -> None:
        for held in self.leased:
            held.pins -= 1
            self.planner.unpin(held)
        self.leased.clear()

    @rule(chain=chains, begin=st.integers(0, BLOCKS - 1))
    def delete(self, chain: int, begin: int) -> None:
        self.planner.delete(SPEC.id, CHAINS[chain][begin:])
        self._bury(CHAINS[chain][begin:])

    def _bury(self, keys: list[BlockKey]) -> None:
        self.deleted |= set(keys)
        self.sequence += 1
        self.buried |= dict.fromkeys(keys, self.sequence)
        self.owed = {item for item in self.owed if item.key not in keys}
        for extent, frame in list(self.disk.items()):
            left = tuple(each for each in frame.blocks if each[1] not in keys)
            if extent in self.file.live:
                self.disk[extent] = frame._replace(blocks=left) if left else frame
            if extent not in self.file.live or not left:
                del self.disk[extent]

    @rule(nbytes=st.integers(1, 15 * PAGE))
    def evict_file(self, nbytes: int) -> None:
        with self.giving_up():
            self.planner.eviction.evict_file(nbytes)

    @rule(nbytes=st.integers(1, 15 * PAGE))
    def shed(self, nbytes: int) -> None:
        has_share = self.planner.eviction.fine_parts.nbytes
        evicted = self.planner.counts.evicted_dram
        self.planner.eviction.shed(nbytes)
        if self.planner.counts.evicted_dram > evicted and not self._held():
            left = self.planner.eviction.fine_parts.nbytes
            assert has_share == 0 or left <= self.planner.eviction.fine_parts.nbytes_min

    def _held(self) -> bool:
        return (
            any(
                r.dirty or r.loading or (r.resident is not None and r.resident.pins)
                for _, r in records(self.planner)
            )
            or self.admission == "demotion"
        )

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Owe no more what leaves the file tier on purpose, or because it is rotten."""
        before = durable_bases(self.planner)
        yield
        self.owed -= before - durable_bases(self.planner)

    @rule()
    def kill(self) -> None:
        """Start again on what the disk has."""
        self.disk = {e: frame for e, frame in self.disk.items() if e in self.file.live}
        for extent in self.file.live - self.disk.keys():
            self.file.free(extent)
        self._start()
        for extent, frame in sorted(self.disk.items(), key=lambda each: each[1].sequence):
            frame.index(self.planner, extent)
        assert self.owed <= durable_bases(self.planner)
        assert not self.deleted & {block.key for block in self.planner.index}

    def teardown(self) -> None:
        """When all is deleted and nobody holds anything, nothing is left."""
        while self.puts:
            self._end_put(0, ok=True)
        self.planner.clear(None)
        while self.writes:
            self._finish_write(0, ok=True)
        while self.reads:
            self._finish_read(set(), corrupt=True)
        while self.checks:
            self.planner.checks.done(self.checks.pop(0), [])
        if self.leased:
            self.release()
        assert not len(self.planner._ledger.replaced)
        assert not self.dram.live
        assert not self.file.live
        assert not len(self.planner.eviction.fine_parts)
        assert self.planner.eviction.fine_parts.nbytes == 0
        dirty = self.planner.dirty
        assert (dirty.nbytes, dirty.queued_nbytes, dirty.count) == (0, 0, 0)
        for use in self.planner.index.namespaces:
            assert (use.blocks, use.dram_nbytes, use.file_nbytes) == (0, 0, 0)
            assert not any(use.dram_records.values())
            assert not any(use.file_records.values())

    # ---- what always holds -------------------------------------------------------------------

    @rule()
    def rest(self) -> None:
        """Nobody can tell whether blocks have rested meanwhile."""
        self.planner.index.rest()

    @invariant()
    def parts_of_two_writers_never_meet(self) -> None:
        for record, base in fine_with_bases(self.planner):
            assert base is not None
            assert base.checksum == record.checksum
            assert base.nbytes == SPEC.groups[record.part.group].base_nbytes

    @invariant()
    def refined_masks_say_what_records_there_are(self) -> None:
        for block in self.planner.index:
            stored, resident = block.complete, block.resident_groups
            for base, fine in zip(BASES, FINES, strict=True):
                record, finer = block.record(base), block.record(fine)
                if record is None or record.nbytes != BASE:
                    continue
                if finer is None:
                    stored &= ~(1 << fine.group)
                if finer is None or finer.resident is None:
                    resident &= ~(1 << fine.group)
            assert block.refined == (stored, resident)

    @invariant()
    def every_place_belongs_to_somebody(self) -> None:
        resident = {r.resident.slot for _, r in records(self.planner) if r.resident}
        slots = resident | {held.slot for held in self.leased}
        slots |= {held.slot for _, all_held, _ in self.puts for held in all_held if held}
        slots |= {held.slot for _, write in self.writes for held in write.held}
        slots |= {held.slot for read in self.reads for held in read.held}
        assert self.dram.live == slots

    @invariant()
    def counts_are_true(self) -> None:
        found = [record for _, record in records(self.planner)]
        assert all(record.fine is (record.part in FINES) for record in found)
        fine = [r for r in found if r.fine and r.resident]
        parts = self.planner.eviction.fine_parts
        assert (len(parts), parts.nbytes) == (len(fine), sum(padded(r.nbytes) for r in fine))
        dirty = [record for record in found if record.dirty]
        assert self.planner.dirty.nbytes == sum(record.nbytes for record in dirty)
        assert self.planner.dirty.count == len(dirty)
        for use in self.planner.index.namespaces:
            in_dram = Counter(r.part.group for r in found if r.resident)
            in_files = Counter(r.part.group for r in found if r.frame)
            assert +use.dram_records == in_dram
            assert +use.file_records == in_files
            assert use.dram_nbytes == sum(padded(r.nbytes) for r in found if r.resident)

    @invariant()
    def who_insists_gets_only_blocks_with_fine_parts(self) -> None:
        for chain in CHAINS:
            for resident in (False, True):
                match = self.planner.match(SPEC.id, chain, refined=True)
                hit = match.resident_blocks if resident else match.hit_blocks
                for at, key in enumerate(chain[:hit]):
                    block = self.planner.index.get(SPEC.id, key)
                    assert block is not None
                    base, fine = block.record(BASES[0]), block.record(FINES[0])
                    assert base is not None
                    if base.nbytes == SPEC.groups[2].base_nbytes:
                        assert fine is not None, at
                        assert fine.resident or not resident

    @invariant()
    def deleted_blocks_stay_away(self) -> None:
        assert not self.deleted & {block.key for block in self.planner.index}


class BaseInFilesMachine(FineMachine):
    """As above, with bases alone in the file tier."""

    write_fine_parts = False


class DemotingMachine(FineMachine):
    """As above, with a policy that learns, and nothing written before it has to leave."""

    policy = "hz"
    admission = "demotion"


class SecondUseMachine(FineMachine):
    """As above, with nothing written before it is used again."""

    admission = "second_use"


TestFine = FineMachine.TestCase
TestBaseInFiles = BaseInFilesMachine.TestCase
TestDemoting = DemotingMachine.TestCase
TestSecondUse = SecondUseMachine.TestCase

for machine in (TestFine, TestBaseInFiles, TestDemoting, TestSecondUse):
    machine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
