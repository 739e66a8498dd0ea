"""Scrubbing: which frames are looked at next, and what is done about wrong bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvstore.decide.index import HeldSlot, StoredBlock, StoredPart
from kvstore.decide.planner.fine_parts import base_of
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.moves import Check
from kvstore.model.outcome import Reason


class Checks:
    """Takes frames to be looked at, the longest unchecked first."""

    def __init__(self, ledger: Ledger, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._now = now

    def next(self, before: float) -> Check | None:
        """Take the frame that was not looked at for longest, if that was `before` some time."""
        for frame in self._ledger.frames:
            if frame.checked_at >= before:
                return None
            if frame.blocks:  # else it only waits for somebody's pin
                break
        else:
            return None
        self._ledger.frames.move_to_end(frame)
        frame.checked_at = self._now()
        frame.pins += 1
        positions, keys = zip(*sorted(frame.blocks.items()), strict=True)
        blocks = [block for block in map(self._ledger.index.by_key, keys) if block is not None]
        records = [block.record(frame.part) for block in blocks]
        return Check(frame, positions, blocks, [record for record in records if record is not None])

    def of(self, block: StoredBlock, record: StoredPart, seen_s: float = math.inf) -> Check | None:
        """Take one record of a frame to be looked at; None: it is in none, or is gone, or its
        frame was last seen to be good more than `seen_s` ago."""
        frame = record.frame
        if frame is None or block.record(record.part) is not record:
            return None
        if frame.checked_at < self._now() - seen_s:
            return None
        frame.pins += 1
        return Check(frame, (record.position,), (block,), (record,))

    def bases(self, check: Check) -> list[int | None]:
        """Return the checksum of each fine part's base; None: the record is no fine part, or its
        base is not here."""
        return [
            self.base_of(block, record)
            for block, record in zip(check.blocks, check.stored, strict=True)
        ]

    def base_of(self, block: StoredBlock, record: StoredPart) -> int | None:
        """Return the checksum of a fine part's base, as `bases` does."""
        namespace = self._ledger.index.namespaces.spec(block.namespace_id)
        if namespace is None or not record.fine:
            return None
        base = block.record(base_of(namespace, record.part))
        return base.checksum if base is not None else None

    def is_unpaired(self, block: StoredBlock, record: StoredPart) -> None:
        """Note that a fine part belongs to another base: it is forgotten in every tier."""
        if block.record(record.part) is record:
            self._ledger.forget_part(block, record, Reason.CORRUPT)

    def resident_is_wrong(self, block: StoredBlock, record: StoredPart, held: HeldSlot) -> None:
        """Note that the arena's bytes of a record are not what was put. What a frame has of it
        stays; without one, the part is forgotten."""
        if block.record(record.part) is not record or record.resident is not held:
            return
        if record.frame is None:
            self._ledger.forget_part(block, record, Reason.CORRUPT)
        else:
            self._ledger.drop_resident(block, record, Reason.CORRUPT)

    def done(self, check: Check, bad: Sequence[int]) -> None:
        """Note which positions of a frame are rotten. What the arena has as well is written anew;
        of the rest, the part is forgotten."""
        part = check.frame.part
        for position, block, record in zip(
            check.positions, check.blocks, check.stored, strict=True
        ):
            gone = block.record(part) is not record or record.frame is not check.frame
            if gone or position not in bad:
                continue
            if record.resident is None:
                self._ledger.forget_part(block, record, Reason.CORRUPT)
            else:
                self._ledger.detach(block, record)
                if not record.dirty and self._ledger.dirty.takes(record):
                    self._ledger.dirty.add(block, part, record)
        self._ledger.unpin_frame(check.frame)
