"""Keeps index, policies and the space of both tiers true to each other.

Four steps change where a record is: `make_resident` and `make_absent` in the arena, `attach` and
`detach` in the file tier. Evicting and forgetting are made of them; others decide which blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.decide.index import FoundRun, HeldSlot, Index, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.copies import Copies
from kvstore.decide.planner.demotion import Demotion
from kvstore.decide.planner.departures import Departures
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.fine_parts import FINE_SHARE, FineParts, base_of
from kvstore.decide.planner.moves import Space
from kvstore.decide.planner.policies import Policies
from kvstore.decide.planner.replaced import Replaced
from kvstore.decide.stored_in import StoredIn
from kvstore.model.block import BlockKey, Part, padded
from kvstore.model.outcome import Reason


@dataclass(slots=True)
class Counts:
    """What left the tiers, ever; `lost` went from the arena without a copy in the file tier, and
    of these `never_durable` had none ever, because writes failed.

    left: blocks by (tier, why), those deleted on purpose included. unwritten: records that the
    write budget kept out of the file tier. thinned: fine parts that made room in the arena.
    """

    evicted_dram: int = 0
    evicted_file: int = 0
    lost: int = 0
    never_durable: int = 0
    unwritten: int = 0
    thinned: int = 0
    left: Counter[tuple[str, str]] = field(default_factory=Counter)


class Ledger:
    """The books of one node."""

    def __init__(
        self,
        dram: Space,
        file: Space | None,
        policies: Policies,
        *,
        now: Callable[[], float],
        departed_keys_max: int,
        write_fine_parts: bool = True,
        fine_share: float = FINE_SHARE,
    ) -> None:
        self.index = Index(policies.rows)
        self.dirty = DirtyRecords(now, takes_fine=write_fine_parts)
        self.fine_parts = FineParts(self.index, fine_share)
        self.copies = Copies()
        self.replaced = Replaced(self.unpin_frame)
        self.counts = Counts()
        self.departures = Departures(departed_keys_max, now)
        self.resident_blocks = 0
        self.framed_blocks = 0
        self.orphans = 0  # slots, ever, that lost their block while somebody held them
        self.has_file = file is not None
        self.policies = policies
        self.demotion: Demotion | None = None  # None: nothing waits to be written by demotion
        self.frames: OrderedDict[StoredFrame, None] = OrderedDict()  # longest unchecked first
        self._dram = dram
        self._file = file
        policies.dram.stored = StoredIn(self.index, framed=False)
        policies.file.stored = StoredIn(self.index, framed=True)

    def unpin(self, held: HeldSlot) -> None:
        """Free a slot that neither the index nor anybody else holds any more."""
        if held.pins == 0 and not held.indexed:
            self._dram.free(held.slot)

    def drop_pins(self, held: Sequence[HeldSlot]) -> None:
        for slot in held:
            slot.pins -= 1
            self.unpin(slot)

    # ---- frames ------------------------------------------------------------------------------

    def withdraw(self, frame: StoredFrame) -> None:
        """Drop a frame whose disk is out of use. What the arena has is to be written elsewhere."""
        blocks = [self._block(key) for key in frame.blocks.values()]
        frame.is_out = True
        self.drop_frame(frame, Reason.DEVICE_OUT)
        for block in blocks:
            record = block.record(frame.part)
            if record is not None and not record.dirty and self.dirty.takes(record):
                self.dirty.add(block, frame.part, record)

    def unpin_frame(self, frame: StoredFrame) -> None:
        """Undo one pin; its space comes back if nothing live is in it and nobody reads it."""
        frame.pins -= 1
        self.free_if_dead(frame)

    def free_if_dead(self, frame: StoredFrame) -> None:
        if not frame.blocks and not frame.pins:
            assert self._file is not None
            self._file.free(frame.extent)
            self.frames.pop(frame, None)

    def drop_frame(self, frame: StoredFrame, reason: Reason) -> None:
        for key in list(frame.blocks.values()):
            block = self._block(key)
            record = block.record(frame.part)
            assert record is not None  # a frame knows what is live in it
            self.detach(block, record)
            if record.resident is None:
                block.remove(record)
                self.departures.note(block.key, reason)
                self._drop_baseless(block)
            if not block.framed_parts:
                self.counts.evicted_file += reason in (Reason.EVICTED, Reason.OVER_SHARE)
                self.counts.left["file", reason] += 1
            self.settle(block)

    def _block(self, key: BlockKey) -> StoredBlock:
        """Return a block of which something is stored."""
        block = self.index.by_key(key)
        assert block is not None
        return block

    # ---- blocks ------------------------------------------------------------------------------

    def forget(self, block: StoredBlock, reason: Reason) -> None:
        """Drop a block from every tier. Slots that are leased stay as they are until released."""
        self.departures.note(block.key, reason)
        self.counts.left["dram", reason] += block.resident_parts > 0
        self.counts.left["file", reason] += block.framed_parts > 0
        for record in block.records:
            self.drop(block, record)
        self.settle(block)

    def evict_resting(self, key: BlockKey, reason: Reason | None) -> bool:
        """Evict a block from the arena that nobody uses, and that a frame has as well, or nothing
        else: then it is lost. This is what eviction does most. False: it is another block, which
        has to be looked at."""
        slot, why = self.index.demote(key), reason or Reason.EVICTED
        if slot is None:
            slot, why = (
                self.index.take(key) if self.demotion is None else None,
                reason or Reason.LOST,
            )
            if slot is None:
                return False
            self.departures.note(key, why)
            self.counts.lost += 1
        self._dram.free(slot)
        self._left_dram(key)
        self.counts.evicted_dram += 1
        self.counts.left["dram", why] += 1
        return True

    def forget_part(self, block: StoredBlock, record: StoredPart, reason: Reason) -> None:
        """Drop one record of a block; the others may be durable, and it can be put again."""
        self.departures.note(block.key, reason)
        self.counts.left["dram", reason] += record.resident is not None
        self.counts.left["file", reason] += record.frame is not None
        kept = self.replaced.take(record)
        self.drop(block, record)
        self.replaced.by(record, kept)
        self.restore(block, record)
        self.settle(block)

    def drop_resident(self, block: StoredBlock, record: StoredPart, reason: Reason) -> None:
        """Drop the arena's copy of a record that a frame has as well."""
        self.counts.left["dram", reason] += 1
        self.make_absent(block, record)
        self.settle(block)

    def drop(self, block: StoredBlock, record: StoredPart) -> None:
        """Drop a record that another version takes the place of, or that is forgotten."""
        self.dirty.drop(block.key, record.part, record)
        self.replaced.release(record)
        self.make_absent(block, record)
        self.detach(block, record)
        block.remove(record)

    def restore(self, block: StoredBlock, gone: StoredPart) -> bool:
        """Let the durable copy count again whose place a record had taken that is gone now."""
        kept = self.replaced.take(gone)
        if kept is None:
            return False
        if not kept.frame.is_out:
            self.drop_fine_of(block, gone.part)
            record = StoredPart(gone.part, kept.nbytes, kept.checksum)
            block.add(record)
            self.attach(kept.frame, kept.position, block, record)
        self.unpin_frame(kept.frame)
        return not kept.frame.is_out

    def settle(self, block: StoredBlock) -> None:
        """Finish a change of a block. A fine part whose base is gone goes as well."""
        self._drop_baseless(block)
        if block.records:
            self.index.refresh(block)
        else:
            self.index.remove(block)

    def moved(self, block: StoredBlock) -> None:
        """Note that a block that stays complete is in another tier, too."""
        if self.index.changed is not None:
            self.index.changed.note(block.key, block.namespace_id)

    def drop_fine_of(self, block: StoredBlock, base: Part) -> None:
        """Drop what the arena has of the fine part of a base that is another writer's from now on.

        One that only a file has is looked at when it is read.
        """
        for record in self._fine_records(block):
            if record.resident is not None and self._base_part(block, record) == base:
                self.drop(block, record)

    def _drop_baseless(self, block: StoredBlock) -> None:
        for record in self._fine_records(block):
            base = self._base_part(block, record)
            if base is not None and block.record(base) is None:
                self.drop(block, record)

    def _fine_records(self, block: StoredBlock) -> list[StoredPart]:
        return [record for record in block.records if record.fine]

    def _base_part(self, block: StoredBlock, fine: StoredPart) -> Part | None:
        """Return what a fine part refines; None: nobody has said what its namespace is."""
        namespace = self.index.namespaces.spec(block.namespace_id)
        return base_of(namespace, fine.part) if namespace is not None else None

    # ---- the four steps ----------------------------------------------------------------------

    def make_resident(self, block: StoredBlock, record: StoredPart, held: HeldSlot) -> None:
        held.indexed = True
        record.resident = held
        self.index.namespaces.in_dram(block.namespace_id, padded(held.nbytes), record.part.group)
        if record.fine:
            self.fine_parts.came(block, record)
        block.resident_parts += 1
        if block.resident_parts == 1:
            self.policies.dram.insert(block.key, block.parent)
            self.resident_blocks += 1

    def make_absent(self, block: StoredBlock, record: StoredPart) -> None:
        held, record.resident = record.resident, None
        if held is None:
            return
        held.indexed = False
        self.index.namespaces.in_dram(block.namespace_id, -padded(held.nbytes), record.part.group)
        if record.fine:
            self.fine_parts.went(block, record)
        self.orphans += held.pins > 0
        self.unpin(held)
        block.resident_parts -= 1
        if not block.resident_parts:
            self._left_dram(block.key)

    def _left_dram(self, key: BlockKey) -> None:
        self.policies.dram.remove(key)
        self.resident_blocks -= 1
        if self.demotion is not None:
            self.demotion.left(key)
        self.copies.left(key)

    def attach(
        self,
        frame: StoredFrame,
        position: int,
        block: StoredBlock,
        record: StoredPart,
        *,
        found: bool = False,
    ) -> None:
        """found: the frame is of an earlier life."""
        self.replaced.release(record)
        record.frame, record.position = frame, position
        frame.blocks[position] = block.key
        self.frames.setdefault(frame)
        nbytes = padded(frame.stored_nbytes[position])
        self.index.namespaces.in_files(block.namespace_id, nbytes, frame.part.group)
        block.framed_parts += 1
        if block.framed_parts == 1:
            admit = self.policies.file.adopt if found else self.policies.file.insert
            admit(block.key, block.parent)
            self.framed_blocks += 1

    def adopt(self, frame: StoredFrame, run: FoundRun) -> bool:
        """Attach a frame of an earlier life to blocks that nobody knows yet. False: each of them
        has to be looked at; nothing has changed then."""
        if not self.index.adopt(frame, run):
            return False
        frame.blocks = dict(zip(run.positions, run.keys, strict=True))
        self.frames.setdefault(frame)
        nbytes = sum(map(padded, map(frame.stored_nbytes.__getitem__, run.positions)))
        self.index.namespaces.in_files(
            run.namespace_id, nbytes, frame.part.group, records=len(run.keys)
        )
        self.policies.file.adopt_all(run.keys, run.parents)
        self.framed_blocks += len(run.keys)
        return True

    def detach(self, block: StoredBlock, record: StoredPart) -> None:
        frame, record.frame = record.frame, None
        if frame is None:
            return
        del frame.blocks[record.position]
        nbytes = padded(frame.stored_nbytes[record.position])
        self.index.namespaces.in_files(block.namespace_id, -nbytes, frame.part.group)
        self.free_if_dead(frame)
        block.framed_parts -= 1
        if not block.framed_parts:
            self.policies.file.remove(block.key)
            self.framed_blocks -= 1
