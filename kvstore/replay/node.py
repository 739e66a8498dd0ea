"""One node without bytes: the planner that ships, over spaces that only count.

A request does what `kvstore.store.store` does for one: it is matched, what is in the file tier
is promoted, what is new is reserved and committed, and is written behind at once. Nothing takes
time, so nobody waits, no lease expires and no promotion comes too late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import TypeVar

from kvstore.decide.index import HeldSlot, StoredBlock, StoredFrame
from kvstore.decide.planner import RUN_NBYTES_MAX, Planner, Reservation, Steps, Write
from kvstore.decide.policy import WriteBudget, policy_by_name
from kvstore.model.block import PAGE_NBYTES, BlockKey, Group, Namespace, Part, Span, padded
from kvstore.model.errors import InvalidRequest
from kvstore.replay.room import LogRoom, Room
from kvstore.settings import LimitSettings

PART = Part(0, 0)
EVICT_ROUNDS_MAX = 8
ROUNDS_MAX = 4  # as often as the store asks again for room
WRITE_NBYTES = 1 << 40  # all there is

T = TypeVar("T")
Borrow = Callable[[Sequence[BlockKey], int], int]
"""Makes the hit of a prefix longer than it is here; returns how long it is then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a node has. dram_blocks, file_blocks: room of each tier, in blocks; 0: no file tier.

    admission, write_bytes_per_day: as of the daemon's file tier. reclaim: how that wins space back,
    of RECLAIMS; what ships punches holes. record_nbytes, file_record_nbytes: of a block in dram and
    in the file tier; 0: as in dram. All blocks have one size, so room and traffic are counted in
    blocks, and bytes are only what these are worth. cost_aware: policies are told what the blocks
    of each model cost to compute. shadow_blocks: in each model of a tier, None: as the daemon has.
    leased_fraction: of dram, the longest hit; what a prompt has beyond it is computed.
    """

    dram_blocks: int
    file_blocks: int = 0
    dram_policy: str = "lru"
    file_policy: str = "lru"
    admission: str = "all"
    write_bytes_per_day: int = 0
    reclaim: str = "punch"
    record_nbytes: int = 1 << 20
    file_record_nbytes: int = 0
    cost_aware: bool = True
    shadow_blocks: int | None = None
    leased_fraction: float = LimitSettings().leased_fraction

    def __post_init__(self) -> None:
        if not self.file_record_nbytes:
            object.__setattr__(self, "file_record_nbytes", self.record_nbytes)

    @property
    def leasable_blocks(self) -> int:
        """The longest hit: the daemon leases no more of its arena at once."""
        return int(self.dram_blocks * self.leased_fraction)


@dataclass(slots=True)
class Traffic:
    """What the tiers did, in blocks. promotions_wasted: came up, but not as part of a hit.
    file_moved: written again to win space back, not counted in file_writes. unwritten: kept out of
    the file tier by the write budget."""

    dram_hits: int = 0
    file_hits: int = 0
    dram_writes: int = 0
    file_writes: int = 0
    file_moved: int = 0
    file_reads: int = 0
    promotions_used: int = 0
    promotions_wasted: int = 0
    refused: int = 0
    unwritten: int = 0


class Clock:
    """Tells the time of the trace."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Node:
    """Answers requests and counts. Raises InvalidRequest for a setup that holds no block.

    costs: seconds that computing a block takes, by model; without any, all is one model.
    """

    def __init__(
        self, setup: Setup, block_tokens: int, costs: Mapping[str, float] | None = None
    ) -> None:
        if setup.dram_blocks < 1:
            raise InvalidRequest("dram has no room for a single block")
        self.clock = Clock()
        self.traffic = Traffic()
        self._setup = setup
        groups = (Group("all", setup.record_nbytes),)
        self._costs = costs or {}
        self._specs = {
            model: Namespace(block_tokens, groups, (("model", model),) if model else ())
            for model in costs or ("",)
        }
        self._record_nbytes = record = padded(setup.record_nbytes)
        self._file = _file_room(setup, record) if setup.file_blocks else None
        self._sequence = count(1)
        self._moved_nbytes_before = 0
        self.planner = self._begin()
        self.namespace = next(iter(self._specs.values())).id  # of the request that is answered

    def _begin(self) -> Planner:
        """Return the planner of a life: its arena is empty."""
        setup = self._setup
        # The planner takes a block in files to be as large as in dram.
        budget = -(-setup.write_bytes_per_day * setup.record_nbytes // setup.file_record_nbytes)
        planner = Planner(
            Room(setup.dram_blocks * self._record_nbytes),
            self._file,
            now=self.clock,
            dram_policy=policy_by_name(setup.dram_policy, setup.shadow_blocks),
            file_policy=policy_by_name(setup.file_policy, setup.shadow_blocks),
            cost_aware=setup.cost_aware,
            write_budget=WriteBudget(budget, self.clock) if budget else None,
            write_on_demotion=setup.admission == "demotion",
            write_on_second_use=setup.admission == "second_use",
        )
        for spec in self._specs.values():
            planner.index.register(spec)
        return planner

    def restart(self) -> None:
        """Lose the arena; find the file tier, and what policies have saved, as a start does."""
        records = (record for block in self.planner.index for record in block.records)
        frames = {record.frame for record in records if record.frame is not None}
        live = {frame: self._live(frame) for frame in frames}
        saved = self.planner.save_policies()
        self.traffic.unwritten += self.planner.counts.unwritten
        self.planner = self._begin()
        self.planner.load_policies(saved)
        for old in sorted(frames, key=attrgetter("sequence")):
            frame = StoredFrame(old.extent, PART, old.codec_id, old.stored_nbytes, old.sequence)
            (position, block), *_ = live[old]
            self.planner.recovery.add(
                block.namespace_id,
                frame,
                [(at, each.key, self._setup.record_nbytes, 0) for at, each in live[old]],
                first_block=block.block_index - position,
                parent=block.parent if not position else None,
            )

    def _live(self, frame: StoredFrame) -> list[tuple[int, StoredBlock]]:
        """Return what is live in a frame, and where."""
        found = ((at, self.planner.index.by_key(key)) for at, key in sorted(frame.blocks.items()))
        return [(at, block) for at, block in found if block is not None]

    def ask(self, keys: Sequence[BlockKey], borrow: Borrow | None = None, model: str = "") -> int:
        """Answer a request: returns how many blocks it hit, and stores what it computed.

        borrow: asked for what this node lacks. model: one of those that costs are known of.
        """
        if not keys:
            return 0
        planner, traffic = self.planner, self.traffic
        if self._costs:
            self.namespace = self._specs[model].id
            planner.costs.told(self._specs[model], self._costs[model], len(keys))
        match = planner.match(self.namespace, keys)
        hit = stored = min(match.hit_blocks, self._setup.leasable_blocks)
        if hit > match.resident_blocks:
            hit = self._promote(keys[:hit], match.resident_blocks)
        traffic.dram_hits += min(hit, match.resident_blocks)
        traffic.file_hits += max(0, hit - match.resident_blocks)
        if borrow is not None and hit == stored == match.hit_blocks < len(keys):
            hit = borrow(keys, hit)
        planner.touch(keys, self.namespace)
        if hit < len(keys):
            self._store(keys, hit)
        return hit

    def take(self, keys: Sequence[BlockKey], hit: int) -> int:
        """Take copies of what another node has of a prefix beyond `hit`, as far as there is room;
        returns how long the hit is then."""
        self._put(keys, hit, copy=True)
        match = self.planner.match(self.namespace, keys)
        stored = min(match.hit_blocks, self._setup.leasable_blocks)
        if stored > match.resident_blocks:
            return self._promote(keys[:stored], match.resident_blocks)
        return min(stored, match.resident_blocks)

    def count_anew(self) -> None:
        """Forget what was counted so far: that was the warm-up."""
        self.traffic = Traffic()
        self.traffic.unwritten = -self.planner.counts.unwritten
        self._moved_nbytes_before = self._moved_nbytes()

    def _moved_nbytes(self) -> int:
        return self._file.moved_nbytes if self._file is not None else 0

    def settle(self) -> None:
        """Count what is only known of all requests together."""
        moved = self._moved_nbytes() - self._moved_nbytes_before
        self.traffic.file_moved = round(moved / (self._record_nbytes + PAGE_NBYTES))
        self.traffic.unwritten += self.planner.counts.unwritten

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Take the hint that the session that asked for `keys` last is over."""
        self.planner.end(keys)

    def _promote(self, keys: Sequence[BlockKey], resident: int) -> int:
        """Bring up what a hit needs; returns how long the hit then is."""
        planner, traffic = self.planner, self.traffic
        came, hit = 0, resident
        for _ in range(ROUNDS_MAX):
            self._make_room(len(keys) - hit)
            with planner.pinned(self._tail(keys, hit)):
                reads = planner.reads.plan(self.namespace, keys, (Span(PART, 0, len(keys)),))
                with closing(reads) as plan:
                    for read in list(plan):
                        came += len(read.blocks)
                        planner.reads.done(read, (), corrupt=False)
            hit = planner.match(self.namespace, keys).resident_blocks
            if hit == len(keys) or not self._write_behind():
                break
        used = min(came, max(0, hit - resident))
        traffic.file_reads += came
        traffic.promotions_used += used
        traffic.promotions_wasted += came - used
        return hit

    def _store(self, keys: Sequence[BlockKey], hit: int) -> None:
        """Put what was not hit, as far as there is room, and write it behind."""
        stored, refused = self._put(keys, hit)
        self.traffic.dram_writes += stored
        self.traffic.refused += refused
        self._write_behind()

    def _put(self, keys: Sequence[BlockKey], hit: int, *, copy: bool = False) -> tuple[int, int]:
        """Put the blocks of a prefix after the first `hit`; returns how many records are new, and
        how many had no room."""
        planner = self.planner
        new, parent = keys[hit:], keys[hit - 1] if hit else None
        spans = (Span(PART, 0, len(new)),)
        for _ in range(ROUNDS_MAX):
            self._make_room(len(new))
            placed = _at_once(planner.puts.place(self.namespace, new, spans, parent))
            slots = [slot for slot in placed.held if slot is not None]
            if not placed.refused or not self._write_behind():
                break
            for slot in slots:  # something was held back until it was written
                planner.unpin(slot)
        with planner.pinned(slots):
            write = Reservation(self.namespace, new, hit, parent, spans, placed.refused, copy=copy)
            checksums = (0,) * len(placed.held)
            stored, _ = _at_once(planner.puts.commit(write, placed.held, checksums))
        return stored, placed.refused

    def _make_room(self, blocks: int) -> None:
        """Write what will leave the arena for so many blocks and was not written yet."""
        while not self.planner.eviction.write_ahead(blocks * self._record_nbytes):
            pass  # the store lets others run here
        self._write_behind()

    def _write_behind(self) -> bool:
        """Write all that is dirty; False: there was nothing, and nothing was to be decided."""
        wrote = False
        while not self.planner.eviction.write_ahead(0):
            wrote = True
        while self._file is not None and (writes := self.planner.writes.take(WRITE_NBYTES)):
            for each in writes:
                self._write(each)
            wrote = True
        return wrote

    def _tail(self, keys: Sequence[BlockKey], end: int) -> list[HeldSlot]:
        """Return the slot of block `end` - 1: while it is pinned, nothing before it leaves."""
        block = self.planner.index.by_key(keys[end - 1]) if end else None
        record = block.record(PART) if block is not None else None
        return [record.resident] if record is not None and record.resident is not None else []

    def _write(self, write: Write) -> None:
        """Carry a write out, evicting for it."""
        assert self._file is not None
        stored = tuple(record.nbytes for record in write.stored)
        nbytes = PAGE_NBYTES + sum(map(padded, stored))
        extent = self._file.allocate(nbytes)
        for _ in range(EVICT_ROUNDS_MAX):
            if extent is not None or not self.planner.eviction.evict_file(nbytes):
                break
            extent = self._file.allocate(nbytes)
        if extent is None:
            self.planner.writes.failed(write)
            return
        self.planner.writes.done(write, extent, 0, stored, next(self._sequence))
        self.traffic.file_writes += len(stored)


def _file_room(setup: Setup, record_nbytes: int) -> Room | LogRoom:
    capacity = setup.file_blocks * (record_nbytes + PAGE_NBYTES)
    if setup.reclaim == "punch":
        return Room(capacity)
    return LogRoom(capacity, PAGE_NBYTES + max(RUN_NBYTES_MAX, record_nbytes))


def _at_once(steps: Steps[T]) -> T:
    """Take all steps of a decision and return it."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            answer: T = done.value
            return answer
