"""The only writer of the index: every decision, none of the I/O.

The store asks, the planner answers at once and returns Moves; `kvstore.move` carries them out and
reports back. All methods run on one thread. `Planner` is a facade; its parts can be read alone:

    puts       slots for what is put, and publishing it        (puts.py)
    admission  what is written to the file tier, and when      (admission.py)
    writes     runs of dirty records, and what became of them  (writes.py)
    reads      promotion from the file tier                    (reads.py)
    eviction   what makes room in the arena and in the files   (eviction.py)
    checks     frames to be looked at, and rotten ones         (checks.py)
    recovery   frames that come and go with their disks        (recovery.py)
    pins       prefixes that a hint holds                      (pins.py)

A record is always in one of these places, and every step moves it between them:

    nowhere --puts.place--> slot --puts.commit--> arena, dirty --writes.take, done--> arena + frame
    arena + frame --eviction--> frame --reads.plan, done--> arena + frame
    arena + frame --eviction.evict_file--> arena
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.decide.costs import Costs
from kvstore.decide.index import (
    HeldSlot,
    Index,
    StoredFrame,
    StoredPart,
)
from kvstore.decide.planner.admission import Admission
from kvstore.decide.planner.checks import Checks
from kvstore.decide.planner.departures import Departures
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.eviction import Eviction
from kvstore.decide.planner.fine_parts import FINE_SHARE, refined_groups
from kvstore.decide.planner.ledger import Counts, Ledger
from kvstore.decide.planner.match import longest_hit, reach
from kvstore.decide.planner.moves import Space
from kvstore.decide.planner.pins import Pins
from kvstore.decide.planner.places import reachable_groups
from kvstore.decide.planner.policies import Policies
from kvstore.decide.planner.puts import Puts
from kvstore.decide.planner.reads import READ_NBYTES, Reads
from kvstore.decide.planner.recovery import Recovery
from kvstore.decide.planner.writes import RUN_NBYTES_MAX, Writes
from kvstore.decide.policy import PolicyFactory, WriteBudget, policy_by_name
from kvstore.model.block import BlockKey, Match, Namespace, NamespaceId, Span
from kvstore.model.outcome import Reason

DEPARTED_KEYS_MAX = 1 << 16
FIRST_KEYS = 64  # of a long prefix, matched before the others: one that is not stored ends there
LRU = policy_by_name("lru")


@dataclass(slots=True)
class Deletion:
    """What a delete touched: how many blocks, and of which namespaces."""

    deleted: int = 0
    namespaces: set[NamespaceId] = field(default_factory=set)


class StoredBlocks(NamedTuple):
    """Blocks with a record in the arena, and blocks with one in a frame; some have both."""

    resident: int
    framed: int


class Planner:
    """Plans over one arena (`dram`) and at most one file tier (`file`).

    run_nbytes_max: payload of the largest frame that the file tier takes. read_nbytes_max: what one
    read promotes at most, if that is more than one record. write_budget: what it does not admit
    stays in the arena alone. write_on_demotion: write what is about to leave the arena, not
    everything at once. write_on_second_use: write what is used again. write_fine_parts: the file
    tier keeps them, too. fine_share: of the arena, kept by fine parts when blocks need room.
    cost_aware: policies are told what a byte of a prefix is worth.
    """

    def __init__(
        self,
        dram: Space,
        file: Space | None,
        *,
        now: Callable[[], float],
        dram_policy: PolicyFactory = LRU,
        file_policy: PolicyFactory = LRU,
        departed_keys_max: int = DEPARTED_KEYS_MAX,
        run_nbytes_max: int = RUN_NBYTES_MAX,
        read_nbytes_max: int = READ_NBYTES,
        write_budget: WriteBudget | None = None,
        write_on_demotion: bool = False,
        write_on_second_use: bool = False,
        write_fine_parts: bool = True,
        fine_share: float = FINE_SHARE,
        cost_aware: bool = True,
    ) -> None:
        self._now = now
        self.costs = Costs()
        self._cost_aware = cost_aware
        self.policies = Policies(dram_policy, file_policy, now, has_file=file is not None)
        ledger = self._ledger = Ledger(
            dram,
            file,
            self.policies,
            now=now,
            departed_keys_max=departed_keys_max,
            write_fine_parts=write_fine_parts,
            fine_share=fine_share,
        )
        self.admission = Admission(
            ledger,
            write_budget,
            on_demotion=write_on_demotion,
            on_second_use=write_on_second_use,
            now=now,
        )
        self.eviction = Eviction(ledger, dram)
        self.puts = Puts(ledger, self.eviction, self.admission)
        self.writes = Writes(ledger, run_nbytes_max, now)
        self.reads = Reads(ledger, self.eviction, read_nbytes_max)
        self.checks = Checks(ledger, now)
        self.recovery = Recovery(ledger)
        self.pins = Pins(ledger)

    @property
    def index(self) -> Index:
        return self._ledger.index

    @property
    def dirty(self) -> DirtyRecords:
        """What is not durable yet, to look at."""
        return self._ledger.dirty

    @property
    def counts(self) -> Counts:
        return self._ledger.counts

    @property
    def departures(self) -> Departures:
        """What left lately, and why."""
        return self._ledger.departures

    @property
    def stored(self) -> StoredBlocks:
        """How many blocks are stored where."""
        return StoredBlocks(self._ledger.resident_blocks, self._ledger.framed_blocks)

    # ---- match -------------------------------------------------------------------------------

    def namespace(self, namespace_id: NamespaceId) -> Namespace:
        """Return a registered namespace, used last from now on. Raises UnknownNamespace."""
        return self.index.namespaces.use(namespace_id)

    def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        skip_blocks: int = 0,
        *,
        in_files: bool = False,
        refined: bool = False,
        windows: bool = True,
    ) -> Match:
        """Return how long the prefix would hit now. Changes nothing.

        in_files: what the asker could read in files by itself counts as resident. refined: a block
        without a fine part that it should have is a miss. windows: False asks how far everything
        else reaches.
        """
        namespace = self.namespace(namespace_id)
        looked_at = len(keys)
        if looked_at > skip_blocks + 2 * FIRST_KEYS:
            looked_at = skip_blocks + FIRST_KEYS
        stored, here = self._masks(namespace_id, namespace, keys[:looked_at], in_files, refined)
        if looked_at < len(keys) and reach(namespace, stored, skip_blocks) == looked_at:
            rest = self._masks(namespace_id, namespace, keys[looked_at:], in_files, refined)
            stored, here = stored + rest[0], here + rest[1]
        length = longest_hit if windows else reach
        hit = length(namespace, stored, skip_blocks)
        return Match(hit, hit if here == stored else length(namespace, here, skip_blocks))

    def _masks(
        self,
        namespace_id: NamespaceId,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        in_files: bool,
        refined: bool,
    ) -> tuple[list[int], list[int]]:
        """Return which groups of each block are stored, and which are resident: see `match`."""
        refined = refined and bool(namespace.fine)
        stored, here = self.index.masks(namespace_id, keys, refined=refined)
        if in_files and here != stored:
            groups = refined_groups if refined else reachable_groups
            blocks = self.index.find(namespace_id, keys)
            here = [groups(block, namespace) if block else 0 for block in blocks]
        return stored, here

    def present(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> list[bool]:
        """Say of each block whether it is stored: all of it, but for windows and fine parts."""
        needed = sum(
            1 << index
            for index, group in enumerate(self.namespace(namespace_id).groups)
            if not group.window_tokens and group.refines == -1
        )
        stored, _ = self.index.masks(namespace_id, keys)
        return [bool(groups) and groups & needed == needed for groups in stored]

    def find(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> list[StoredPart | None]:
        """Return the records of `spans` in their order, None where one is not stored."""
        first = min((span.begin for span in spans), default=0)
        last = max((span.end for span in spans), default=0)
        blocks = self.index.find(namespace_id, keys[first:last])
        return [
            None if block is None else block.record(part)
            for part, begin, end in spans
            for block in blocks[begin - first : end - first]
        ]

    def touch(self, prefix: Sequence[BlockKey], namespace_id: NamespaceId | None = None) -> None:
        """Note that a request asked for a prefix, whether or not all of it is stored.

        namespace_id: None if what it costs to compute does not matter.
        """
        self.admission.asked(prefix)
        level = 0
        if self._cost_aware and namespace_id is not None:
            level = self.costs.level(namespace_id)
        self.policies.touch(prefix, level)
        if self._ledger.fine_parts:
            self._ledger.fine_parts.touch(prefix)
        self.admission.used(prefix)

    # ---- hints: see also `pins` and `eviction.demote_prefix` -----------------------------------

    def end(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Take the hint that the session whose last request asked for a prefix is over; returns
        the blocks that it alone has used.

        What would leave the arena unwritten for it keeps its place there: the others can be
        promoted again, and it would be lost.
        """
        dram, file = self.policies.dram, self.policies.file
        alone = dram.alone(prefix)
        if self._ledger.demotion is None:
            dram.end(alone)
        else:
            self._ledger.demotion.spare(alone)
        of_file = file.alone(prefix)
        file.end(of_file)
        return max(alone, of_file, key=len)

    def expect(self, prefix: Sequence[BlockKey], in_s: float) -> None:
        """Take the hint that somebody will ask for a prefix in so many seconds."""
        self.policies.expect(prefix, self._now() + in_s)

    # ---- deleting ------------------------------------------------------------------------------

    def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Deletion:
        """Forget blocks now. What may be on disk is the write-behind's to bury."""
        mine = (key for key in keys if self.index.get(namespace_id, key) is not None)
        return self._forget(mine, Reason.DELETED)

    def clear(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None = None
    ) -> Deletion:
        """Forget every block of a namespace, or of all. keys: only these, as far as it has them;
        without them it looks at all blocks there are."""
        if keys is None:
            keys = list(self.index.keys(namespace_id))
        only = None if namespace_id is None else (namespace_id,)
        return self._forget(self.index.walks.kept(keys, only), Reason.CLEARED)

    def _forget(self, keys: Iterable[BlockKey], reason: Reason) -> Deletion:
        deletion = Deletion()
        for key in dict.fromkeys(keys):
            block = self.index.by_key(key)
            assert block is not None
            self._ledger.forget(block, reason)
            deletion.deleted += 1
            deletion.namespaces.add(block.namespace_id)
        return deletion

    # ---- holding -------------------------------------------------------------------------------

    @contextmanager
    def pinned(self, slots: Sequence[HeldSlot]) -> Iterator[None]:
        """Keep slots where they are for as long as the context lasts."""
        for held in slots:
            held.pins += 1
        try:
            yield
        finally:
            self._ledger.drop_pins(slots)

    @contextmanager
    def pinned_frames(self, frames: Collection[StoredFrame]) -> Iterator[None]:
        """Keep frames on their disks for as long as the context lasts."""
        for frame in frames:
            frame.pins += 1
        try:
            yield
        finally:
            for frame in frames:
                self._ledger.unpin_frame(frame)

    def unpin(self, held: HeldSlot) -> None:
        """Free a slot that neither the index nor anybody else holds any more."""
        self._ledger.unpin(held)

    def unpin_frame(self, frame: StoredFrame) -> None:
        """Undo one pin of a frame, which may have been deleted meanwhile: then it leaves now."""
        self._ledger.unpin_frame(frame)

    # ---- another life --------------------------------------------------------------------------

    def save_policies(self) -> bytes:
        """Return what policies should know after a restart: a few MiB at most."""
        return self.admission.save() + self.costs.save() + self.policies.save()

    def load_policies(self, saved: bytes) -> None:
        """Take what another life has saved, before anything is recovered; what cannot be read is
        ignored."""
        self.policies.load(self.costs.load(self.admission.load(saved)))
