"""Which blocks make room, in the arena and in the file tier.

The policies give the order. What somebody holds, or has to be written first, is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from kvstore.decide.index import Extent, HeldSlot, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.fine_parts import FineParts
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.moves import Space
from kvstore.model.block import BlockKey, Slot, padded
from kvstore.model.outcome import Reason

# Blocks looked at for one slot before giving up: pinned and dirty ones are passed over, and a long
# queue of them must not turn one reserve into a walk over the whole index.
VICTIMS_MAX = 1024
EVICTED_AHEAD_MAX = 64
EVICTED_AHEAD_SHARE = 64  # one block in so many of those in the arena, at most
FILE_VICTIMS_MAX = 8192  # of which one of several disks may have few


class Eviction:
    """Evicts from the books, and gives out the space that is freed."""

    def __init__(self, ledger: Ledger, dram: Space) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._dram = dram
        self._reason: Reason | None = None  # for what is evicted now, beside that room is made

    @contextmanager
    def because(self, reason: Reason | None) -> Iterator[None]:
        """Note `reason` of what is evicted within the context; None: that room is made."""
        self._reason = reason
        try:
            yield
        finally:
            self._reason = None

    @property
    def fine_parts(self) -> FineParts:
        """The fine parts that the arena has."""
        return self._ledger.fine_parts

    def find_slot(
        self, nbytes: int, *, fine: bool = False, placed_nbytes: int = 0
    ) -> HeldSlot | None:
        """Return an unpinned slot, evicting for it, or None.

        Fine parts leave first, as far as they have more than their share. fine: the slot is for
        one of them: no block leaves for it while they have their share. placed_nbytes: of slots
        that fine parts were given, but that are not published yet: they count as well.
        """
        slot = self._dram.allocate(nbytes)
        if slot is not None:
            return HeldSlot(slot)
        parts = self._ledger.fine_parts
        has_share = parts.nbytes + placed_nbytes >= parts.nbytes_min
        if has_share and len(parts):
            comes = placed_nbytes + padded(nbytes) if fine else placed_nbytes
            slot = self._slot_of_fine_parts(nbytes, comes)
        if slot is None and not (fine and has_share):
            slot = self._slot_of_victims(nbytes)
        return HeldSlot(slot) if slot is not None else None

    def _slot_of_fine_parts(self, nbytes: int, comes: int) -> Slot | None:
        """Drop fine parts until a slot is free, as long as they keep their share. comes: bytes of
        those that are about to be published."""
        for key, record in self.fine_parts.to_leave():
            left = self.fine_parts.nbytes - padded(record.nbytes)
            if left + comes < self.fine_parts.nbytes_min:
                break
            if self.drop_fine(self._index.by_key(key), record):
                slot: Slot | None = self._dram.allocate(nbytes)
                if slot is not None:
                    return slot
        return None

    def drop_fine(self, block: StoredBlock | None, record: StoredPart) -> bool:
        """Drop the arena's copy of a fine part, unless somebody needs it."""
        held = record.resident
        if block is None or held is None or held.pins or record.dirty:
            return False
        demotion, dirty = self._ledger.demotion, self._ledger.dirty
        unwritten = record.frame is None and dirty.takes(record)
        if demotion is not None and unwritten and demotion.holds_back(block):
            return False
        self._ledger.make_absent(block, record)
        if record.frame is None:
            dirty.give_up(block.key, record.part)
            block.remove(record)
        self._ledger.counts.thinned += 1
        self._ledger.settle(block)
        return True

    def _slot_of_victims(self, nbytes: int) -> Slot | None:
        """Evict what is to leave first until a slot is free. If it had to pass over what somebody
        holds, which may be a long way, it evicts a few more blocks while it is there."""
        slot: Slot | None = None
        evicted = 0
        pinned: list[StoredBlock] = []
        to_be_written = False
        for key in islice(self._ledger.policies.dram.victims(), VICTIMS_MAX):
            if not self._ledger.evict_resting(key, self._reason):
                block = self._in_dram(key)
                if block is None:
                    continue
                if not self._evict_dram(block):
                    if _is_pinned(block):
                        pinned.append(block)
                    else:
                        to_be_written = True
                    continue
            evicted += 1
            if slot is None:
                slot = self._dram.allocate(nbytes)
            if slot is not None and (not pinned or evicted >= self._evicted_ahead):
                return slot
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
                above = self._index.by_key(above.parent)
                if above is not None and above.resident_parts and self._is_framed(above):
                    yield above

    def shed(self, nbytes: int) -> int:
        """Evict what is to leave the arena first, about `nbytes` of it; returns the bytes freed.

        Fine parts leave first, as for `find_slot`. What somebody holds, or has to be written first,
        is passed over.
        """
        freed = self._shed_fine_parts(nbytes)
        pinned: list[StoredBlock] = []
        for key in islice(self._ledger.policies.dram.victims(), VICTIMS_MAX):
            if freed >= nbytes:
                return freed
            block = self._in_dram(key)
            if block is None:
                continue
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

    def _shed_fine_parts(self, nbytes: int) -> int:
        before = self.fine_parts.nbytes
        least = max(self.fine_parts.nbytes_min, before - nbytes)
        for key, record in self.fine_parts.to_leave():
            if self.fine_parts.nbytes <= least:
                break
            self.drop_fine(self._index.by_key(key), record)
        return before - self.fine_parts.nbytes

    @property
    def _evicted_ahead(self) -> int:
        return min(EVICTED_AHEAD_MAX, self._ledger.resident_blocks // EVICTED_AHEAD_SHARE)

    def demote_prefix(self, prefix: Sequence[BlockKey]) -> tuple[int, int, bool]:
        """Drop the arena's copies of what only the last asker of a prefix has used, tail first, as
        far as the file tier has it. Returns blocks, bytes, and whether a write stands in the way,
        which is queued then.
        """
        blocks = nbytes = 0
        alone = self._ledger.policies.dram.alone(prefix)
        for key in reversed(dict.fromkeys(alone)):  # a client may name a block twice
            block = self._in_dram(key)
            if block is None or not self._ledger.policies.dram.is_leaf(key):
                break
            resident = [r for r in block.records if r.resident is not None]
            if any(record.dirty for record in resident) or not self._is_framed(block):
                if self._ledger.demotion is not None:
                    self._ledger.demotion.queue_wanted(alone)
                return blocks, nbytes, any(record.dirty for record in resident)
            if not self._evict_dram(block):
                break
            blocks += 1
            nbytes += sum(record.nbytes for record in resident)
        return blocks, nbytes, False

    def write_ahead(self, nbytes: int) -> bool:
        """Queue the writes of what will leave the arena first, about so many bytes of it. False:
        it is not yet decided what of it is written; call again to go on, in another step."""
        demotion = self._ledger.demotion
        if demotion is None:
            return True
        demotion.go_on()
        for key in islice(self._ledger.policies.dram.victims(), VICTIMS_MAX):
            if nbytes <= 0:
                break
            block = self._in_dram(key)
            if block is None:
                continue
            nbytes -= demotion.queue(block, nbytes)
            if demotion.decides:
                break
        return not demotion.decides

    def _in_dram(self, key: BlockKey) -> StoredBlock | None:
        """Return a block that the policy has named; None: it is not in the arena, so another policy
        goes on."""
        block = self._index.by_key(key)
        if block is not None and block.resident_parts:
            return block
        self._ledger.policies.dram.errs()
        return None

    def _evict_dram(self, block: StoredBlock) -> bool:
        """Drop the arena's copies of all parts of a block, unless somebody needs one of them."""
        records = block.records
        if _is_pinned(block) or any(record.dirty for record in records):
            return False
        if self._ledger.demotion is not None and self._ledger.demotion.holds_back(block):
            return False
        lost = 0
        for record in records:
            self._ledger.make_absent(block, record)
            if record.frame is None:
                block.remove(record)
                lost += not record.fine
                self._ledger.counts.never_durable += self._ledger.dirty.give_up(
                    block.key, record.part
                )
        for record in records:
            lost -= self._ledger.restore(block, record)
        if lost:
            self._ledger.departures.note(block.key, self._reason or Reason.LOST)
        self._ledger.counts.lost += lost
        self._ledger.counts.evicted_dram += 1
        reason = self._reason or (Reason.LOST if lost else Reason.EVICTED)
        self._ledger.counts.left["dram", reason] += 1
        self._ledger.settle(block)
        return True

    def _is_framed(self, block: StoredBlock) -> bool:
        """Say whether the file tier has all that it is to have of a block."""
        takes = self._ledger.dirty.takes
        return all(record.frame is not None or not takes(record) for record in block.records)

    def evict_file(self, nbytes: int, helps: Callable[[Extent], bool] = lambda extent: True) -> int:
        """Drop whole frames, tails of prefixes first, until `nbytes` are on their way back.

        Only frames where `helps` says so are counted. Others leave if what helps is newer, because
        the end of a prefix is worth nothing without its start, on whichever disk. Returns the bytes
        that will come back, which may be fewer.
        """
        freed = self._evict_frames(nbytes, helps)
        if freed < nbytes and len(self._ledger.replaced):
            freed += self._ledger.replaced.release_all()
            freed += self._evict_frames(nbytes - freed, helps)
        return freed

    def _evict_frames(self, nbytes: int, helps: Callable[[Extent], bool]) -> int:
        freed = 0
        passed: dict[StoredFrame, None] = {}
        for key in islice(self._ledger.policies.file.victims(), FILE_VICTIMS_MAX):
            if freed >= nbytes:
                break
            block = self._index.by_key(key)
            if block is None or not block.framed_parts:
                self._ledger.policies.file.errs()
                continue
            found = [record.frame for record in block.records]
            frames = dict.fromkeys(frame for frame in found if frame is not None)
            if any(frame.pins for frame in frames):
                continue
            passed |= frames
            if any(helps(frame.extent) for frame in frames):
                freed += sum(frame.extent.nbytes for frame in passed if helps(frame.extent))
                for frame in passed:
                    self._ledger.drop_frame(frame, self._reason or Reason.EVICTED)
                passed.clear()
        return freed


def _is_pinned(block: StoredBlock) -> bool:
    """Say whether somebody uses a slot of a block."""
    return any(r.resident is not None and r.resident.pins for r in block.records)


def _resident_nbytes(block: StoredBlock) -> int:
    """Return what a block takes of the arena."""
    slots = [record.resident for record in block.records]
    return sum(padded(slot.nbytes) for slot in slots if slot is not None)
