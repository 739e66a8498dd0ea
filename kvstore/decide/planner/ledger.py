"""Keeps index, policies and the space of both tiers true to each other.

Four steps change where a record is: `make_resident` and `make_absent` in the arena, `attach` and
`detach` in the file tier. Evicting and forgetting are made of them; the planner decides which.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.decide.index import Extent, HeldSlot, Index, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.demotion import Demotion
from kvstore.decide.planner.departures import Departures
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.moves import Space
from kvstore.decide.planner.second_use import SecondUse
from kvstore.decide.planner.unwritten import Unwritten
from kvstore.decide.policy import PolicyFactory
from kvstore.model.block import BlockKey, Slot, padded
from kvstore.model.outcome import Reason

# Blocks looked at for one slot before giving up: pinned and dirty ones are passed over, and a long
# queue of them must not turn one reserve into a walk over the whole index.
VICTIMS_MAX = 1024
EVICTED_AHEAD_MAX = 64
EVICTED_AHEAD_SHARE = 64  # one block in so many of those in the arena, at most
FILE_VICTIMS_MAX = 8192  # of which one of several disks may have few
_SAVED = struct.Struct("<I")  # bytes of the first policy's


@dataclass(slots=True)
class Counts:
    """What left the tiers, ever; `lost` went from the arena without a copy in the file tier, and
    of these `never_durable` had none ever, because writes failed.

    left: blocks by (tier, why), those deleted on purpose included. unwritten: records that the
    write budget kept out of the file tier.
    """

    evicted_dram: int = 0
    evicted_file: int = 0
    lost: int = 0
    never_durable: int = 0
    unwritten: int = 0
    left: Counter[tuple[str, str]] = field(default_factory=Counter)


class Ledger:
    """The books of one node."""

    def __init__(
        self,
        dram: Space,
        file: Space | None,
        *,
        dram_policy: PolicyFactory,
        file_policy: PolicyFactory,
        now: Callable[[], float],
        departed_keys_max: int,
    ) -> None:
        self.index = Index()
        self.dirty = DirtyRecords(now)
        self.counts = Counts()
        self.departures = Departures(departed_keys_max, now)
        self.resident_blocks = 0
        self.framed_blocks = 0
        self.orphans = 0  # slots, ever, that lost their block while somebody held them
        self.has_file = file is not None
        self.demotion: Demotion | None = None  # neither of them: everything is written at once
        self.second_use: SecondUse | None = None
        self.unwritten: Unwritten | None = None  # or it is not offered again
        self.frames: OrderedDict[StoredFrame, None] = OrderedDict()  # longest unchecked first
        self._dram = dram
        self._file = file
        self._dram_policy = dram_policy(now)
        self._file_policy = file_policy(now)

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asked for a prefix."""
        self._dram_policy.touch(prefix)
        if self.has_file:
            self._file_policy.touch(prefix)
        if self.demotion is not None:
            self.demotion.want(prefix)
        if self.unwritten is not None:
            self.unwritten.used(prefix)

    def end(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Note that the session that asked for a prefix last will not come back; returns the
        blocks that it alone has used.

        What would leave the arena unwritten for it keeps its place there: the others come up
        again, and it would be lost.
        """
        alone = self._dram_policy.alone(prefix)
        if self.demotion is None:
            self._dram_policy.end(alone)
        else:
            self.demotion.spare(alone)
        of_file = self._file_policy.alone(prefix)
        self._file_policy.end(of_file)
        return max(alone, of_file, key=len)

    def expect(self, prefix: Sequence[BlockKey], at: float) -> None:
        """Note that somebody will ask for a prefix at `at`."""
        self._dram_policy.expect(prefix, at)
        self._file_policy.expect(prefix, at)

    def hold(self, keys: Sequence[BlockKey]) -> None:
        """Let no search for a victim stop at blocks that stay pinned for long."""
        self._dram_policy.hold(keys)

    def let_go(self, keys: Sequence[BlockKey]) -> None:
        """Undo one `hold` of the same blocks."""
        self._dram_policy.let_go(keys)

    def save(self) -> bytes:
        """Return what policies should know in another life."""
        dram, file = self._dram_policy.save(), self._file_policy.save()
        return _SAVED.pack(len(dram)) + dram + file if dram or file else b""

    def load(self, saved: bytes) -> None:
        """Give it to them."""
        if len(saved) >= _SAVED.size:
            end = _SAVED.size + _SAVED.unpack_from(saved)[0]
            self._dram_policy.load(saved[_SAVED.size : end])
            self._file_policy.load(saved[end:])

    # ---- slots -------------------------------------------------------------------------------

    def find_slot(self, nbytes: int) -> HeldSlot | None:
        """Return an unpinned slot, evicting for it, or None."""
        slot = self._dram.allocate(nbytes)
        if slot is None:
            slot = self._slot_of_victims(nbytes)
        return HeldSlot(slot) if slot is not None else None

    def _slot_of_victims(self, nbytes: int) -> Slot | None:
        """Evict what is to leave first until a slot is free. If it had to pass over what somebody
        holds, which may be a long way, it evicts a few more blocks while it is there."""
        slot: Slot | None = None
        evicted = 0
        pinned: list[StoredBlock] = []
        to_be_written = False
        for key in islice(self._dram_policy.victims(), VICTIMS_MAX):
            block = self.index.by_key(key)
            assert block is not None
            if self._evict_dram(block):
                evicted += 1
                if slot is None:
                    slot = self._dram.allocate(nbytes)
                if slot is not None and (not pinned or evicted >= self._evicted_ahead):
                    return slot
            elif _is_pinned(block):
                pinned.append(block)
            else:
                to_be_written = True
        if slot is not None or to_be_written:  # soon there is room
            return slot
        return self._slot_before(pinned, nbytes)

    def _slot_before(self, pinned: Sequence[StoredBlock], nbytes: int) -> Slot | None:
        """Evict blocks that come before one that somebody holds, from the nearest on, as far as
        the file tier has them.

        So a prefix larger than the arena passes through it: what is written behind leaves although
        its child, the parent of the block that is put next, has to stay for now.
        """
        slot: Slot | None = None
        evicted = 0
        for above in self._framed_before(pinned):
            if self._evict_dram(above):
                evicted += 1
                if slot is None:
                    slot = self._dram.allocate(nbytes)
                if slot is not None and evicted >= self._evicted_ahead:
                    return slot
        return slot

    def _framed_before(self, pinned: Sequence[StoredBlock]) -> Iterator[StoredBlock]:
        """Yield what the arena and the file tier both have before blocks that somebody holds."""
        looked_at = 0
        for block in pinned:
            above: StoredBlock | None = block
            while above is not None and above.parent is not None and looked_at < VICTIMS_MAX:
                looked_at += 1
                above = self.index.by_key(above.parent)
                if above is not None and above.resident_parts and _is_framed(above):
                    yield above

    def shed(self, nbytes: int) -> int:
        """Evict what is to leave the arena first, about `nbytes` of it; returns the bytes freed.

        What somebody holds, or has to be written first, is passed over.
        """
        freed = 0
        pinned: list[StoredBlock] = []
        for key in islice(self._dram_policy.victims(), VICTIMS_MAX):
            if freed >= nbytes:
                return freed
            block = self.index.by_key(key)
            assert block is not None
            resident_nbytes = _resident_nbytes(block)
            if self._evict_dram(block):
                freed += resident_nbytes
            elif _is_pinned(block):
                pinned.append(block)
        for above in self._framed_before(pinned):
            if freed >= nbytes:
                break
            resident_nbytes = _resident_nbytes(above)
            if self._evict_dram(above):
                freed += resident_nbytes
        return freed

    @property
    def _evicted_ahead(self) -> int:
        return min(EVICTED_AHEAD_MAX, self.resident_blocks // EVICTED_AHEAD_SHARE)

    def send_down(self, prefix: Sequence[BlockKey]) -> tuple[int, int, bool]:
        """Drop the arena's copies of what only the last asker of a prefix has used, tail first, as
        far as the file tier has it. Returns blocks, bytes, and whether a write stands in the way,
        which is queued then.
        """
        blocks = nbytes = 0
        alone = self._dram_policy.alone(prefix)
        for key in reversed(alone):
            block = self.index.by_key(key)
            assert block is not None
            if not self._dram_policy.is_leaf(key):
                break
            resident = [r for r in block.records if r.resident is not None]
            if any(record.frame is None or record.dirty for record in resident):
                if self.demotion is not None:
                    self.demotion.queue_wanted(alone)
                return blocks, nbytes, any(record.dirty for record in resident)
            if not self._evict_dram(block):
                break
            blocks += 1
            nbytes += sum(record.nbytes for record in resident)
        return blocks, nbytes, False

    def demote(self, nbytes: int) -> None:
        """Queue the writes of what will leave the arena first, about so many bytes of it."""
        if self.demotion is None:
            return
        for key in islice(self._dram_policy.victims(), VICTIMS_MAX):
            if nbytes <= 0:
                break
            block = self.index.by_key(key)
            assert block is not None
            nbytes -= self.demotion.queue(block, nbytes)

    def demote_all(self) -> None:
        """Queue the writes of all that the arena alone has."""
        later = self.demotion or self.second_use
        if later is not None:
            later.queue_all()

    def unpin(self, held: HeldSlot) -> None:
        """Free a slot that neither the index nor anybody else holds any more."""
        if held.pins == 0 and not held.indexed:
            self._dram.free(held.slot)

    def drop_pins(self, held: Sequence[HeldSlot]) -> None:
        for slot in held:
            slot.pins -= 1
            self.unpin(slot)

    def _evict_dram(self, block: StoredBlock) -> bool:
        """Drop the arena's copies of all parts of a block, unless somebody needs one of them."""
        records = block.records
        if _is_pinned(block) or any(record.dirty for record in records):
            return False
        if self.demotion is not None and self.demotion.holds_back(block):
            return False
        lost = 0
        for record in records:
            self.make_absent(block, record)
            if record.frame is None:
                block.remove(record)
                lost += 1
                self.counts.never_durable += self.dirty.give_up(block.key, record.part)
        if lost:
            self.departures.note(block.key, Reason.LOST)
        self.counts.lost += lost
        self.counts.evicted_dram += 1
        self.counts.left["dram", Reason.LOST if lost else Reason.EVICTED] += 1
        self._settle(block)
        return True

    # ---- frames ------------------------------------------------------------------------------

    def evict_file(self, nbytes: int, helps: Callable[[Extent], bool]) -> int:
        """Drop whole frames, tails of prefixes first, until `nbytes` are on their way back.

        Only frames where `helps` says so are counted. Others leave if what helps is newer, because
        the end of a prefix is worth nothing without its start, on whichever disk. Returns the bytes
        that will come back, which may be fewer.
        """
        freed = 0
        passed: dict[StoredFrame, None] = {}
        for key in islice(self._file_policy.victims(), FILE_VICTIMS_MAX):
            if freed >= nbytes:
                break
            block = self.index.by_key(key)
            assert block is not None
            found = [record.frame for record in block.records]
            frames = dict.fromkeys(frame for frame in found if frame is not None)
            if any(frame.pins for frame in frames):
                continue
            passed |= frames
            if any(helps(frame.extent) for frame in frames):
                freed += sum(frame.extent.nbytes for frame in passed if helps(frame.extent))
                for frame in passed:
                    self._drop_frame(frame, Reason.EVICTED)
                passed.clear()
        return freed

    def withdraw(self, frame: StoredFrame) -> None:
        """Drop a frame whose disk is out of use. What the arena has is to be written elsewhere."""
        blocks = list(frame.blocks.values())
        frame.is_out = True
        self._drop_frame(frame, Reason.DEVICE_OUT)
        for block in blocks:
            record = block.record(frame.part)
            if record is not None and not record.dirty:
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

    def _drop_frame(self, frame: StoredFrame, reason: Reason) -> None:
        for block in list(frame.blocks.values()):
            record = block.record(frame.part)
            assert record is not None  # a frame knows what is live in it
            self.detach(block, record)
            if record.resident is None:
                block.remove(record)
                self.departures.note(block.key, reason)
            if not block.framed_parts:
                self.counts.evicted_file += reason is Reason.EVICTED
                self.counts.left["file", reason] += 1
            self._settle(block)

    # ---- blocks ------------------------------------------------------------------------------

    def forget(self, block: StoredBlock, reason: Reason) -> None:
        """Drop a block from every tier. Slots that are leased stay as they are until released."""
        self.departures.note(block.key, reason)
        self.counts.left["dram", reason] += block.resident_parts > 0
        self.counts.left["file", reason] += block.framed_parts > 0
        for record in block.records:
            self.drop(block, record)
        self._settle(block)

    def forget_part(self, block: StoredBlock, record: StoredPart, reason: Reason) -> None:
        """Drop one record of a block; the others may be durable, and it can be put again."""
        self.departures.note(block.key, reason)
        self.counts.left["dram", reason] += record.resident is not None
        self.counts.left["file", reason] += record.frame is not None
        self.drop(block, record)
        self._settle(block)

    def drop_resident(self, block: StoredBlock, record: StoredPart, reason: Reason) -> None:
        """Drop the arena's copy of a record that a frame has as well."""
        self.counts.left["dram", reason] += 1
        self.make_absent(block, record)
        self._settle(block)

    def drop(self, block: StoredBlock, record: StoredPart) -> None:
        """Drop a record that another version takes the place of, or that is forgotten."""
        self.dirty.drop(block.key, record.part, record)
        self.make_absent(block, record)
        self.detach(block, record)
        block.remove(record)

    def _settle(self, block: StoredBlock) -> None:
        if block.records:
            self.index.refresh(block)
        else:
            self.index.remove(block)

    # ---- the four steps ----------------------------------------------------------------------

    def make_resident(self, block: StoredBlock, record: StoredPart, held: HeldSlot) -> None:
        held.indexed = True
        record.resident = held
        self.index.namespaces.in_dram(block.namespace_id, padded(held.nbytes))
        block.resident_parts += 1
        if block.resident_parts == 1:
            self._dram_policy.insert(block.key, block.parent)
            self.resident_blocks += 1

    def make_absent(self, block: StoredBlock, record: StoredPart) -> None:
        held, record.resident = record.resident, None
        if held is None:
            return
        held.indexed = False
        self.index.namespaces.in_dram(block.namespace_id, -padded(held.nbytes))
        self.orphans += held.pins > 0
        self.unpin(held)
        block.resident_parts -= 1
        if not block.resident_parts:
            self._dram_policy.remove(block.key)
            self.resident_blocks -= 1
            if self.demotion is not None:
                self.demotion.left(block.key)

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
        record.frame, record.position = frame, position
        frame.blocks[position] = block
        self.frames.setdefault(frame)
        self.index.namespaces.in_files(block.namespace_id, padded(frame.stored_nbytes[position]))
        block.framed_parts += 1
        if block.framed_parts == 1:
            admit = self._file_policy.adopt if found else self._file_policy.insert
            admit(block.key, block.parent)
            self.framed_blocks += 1

    def detach(self, block: StoredBlock, record: StoredPart) -> None:
        frame, record.frame = record.frame, None
        if frame is None:
            return
        del frame.blocks[record.position]
        nbytes = padded(frame.stored_nbytes[record.position])
        self.index.namespaces.in_files(block.namespace_id, -nbytes)
        self.free_if_dead(frame)
        block.framed_parts -= 1
        if not block.framed_parts:
            self._file_policy.remove(block.key)
            self.framed_blocks -= 1


def _is_pinned(block: StoredBlock) -> bool:
    """Say whether somebody uses a slot of a block."""
    return any(r.resident is not None and r.resident.pins for r in block.records)


def _resident_nbytes(block: StoredBlock) -> int:
    """Return what a block takes of the arena."""
    slots = [record.resident for record in block.records]
    return sum(padded(slot.nbytes) for slot in slots if slot is not None)


def _is_framed(block: StoredBlock) -> bool:
    """Say whether the file tier has all of a block."""
    return all(record.frame is not None for record in block.records)
