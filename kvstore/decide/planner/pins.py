"""Blocks that a hint keeps in the arena for a while. Bounded in bytes, and each pin ends.

A pinned block never leaves for room, so pins are kept out of the walk for a victim as well: one
that had to pass them all would find none. What is deleted is gone at once, for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner.ledger import Ledger
from kvstore.model.block import BlockKey, padded

PINS_MAX = 4096


class Pin(NamedTuple):
    """What one hint holds, until when."""

    keys: tuple[BlockKey, ...]
    slots: tuple[HeldSlot, ...]
    until: float


class Pins:
    """Pins by the name of whoever asked for them; a slot that several hold counts once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pins: dict[str, Pin] = {}
        self._holders: dict[HeldSlot, int] = {}
        self._orphans = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._pins)

    def until(self, name: str) -> float | None:
        """Return when a pin ends; None: there is none."""
        pin = self._pins.get(name)
        return pin.until if pin is not None else None

    def pin(
        self,
        name: str,
        keys: Sequence[BlockKey],
        until: float,
        *,
        pin_nbytes_max: int,
        all_nbytes_max: int,
    ) -> tuple[int, int]:
        """Hold what the arena has of a prefix, from its start on, instead of what `name` holds.

        pin_nbytes_max: what this pin may hold; all_nbytes_max: all of them together. Returns how
        many blocks are held, and their bytes.
        """
        before = self._pins.pop(name, None)
        mine = {s for s in before.slots if self._holders[s] == 1} if before is not None else set()
        room = all_nbytes_max - (self.nbytes - _nbytes(mine))
        blocks: list[BlockKey] = []
        slots: list[HeldSlot] = []
        held = added = 0
        if len(self._pins) < PINS_MAX:
            for key in keys:
                block = self._ledger.index.by_key(key)
                records = block.records if block is not None else ()
                found = [r.resident for r in records if r.resident is not None]
                nbytes = _nbytes(found)
                new = _nbytes([s for s in found if s not in self._holders or s in mine])
                if not found or held + nbytes > pin_nbytes_max or added + new > room:
                    break
                held, added = held + nbytes, added + new
                blocks.append(key)
                slots += found
        if slots:
            self._take(name, Pin(tuple(blocks), tuple(slots), until))
        if before is not None:
            self._drop(before)
        return len(blocks), held

    def let_go(self, name: str) -> int:
        """End a pin; returns how many blocks it held."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        self._drop(pin)
        return len(pin.keys)

    def expire(self, now: float) -> int:
        """End the pins whose time has come, and of the others what was deleted. Returns how many
        have ended."""
        over = [name for name, pin in self._pins.items() if pin.until <= now]
        for name in over:
            self.let_go(name)
        if self._orphans != self._ledger.orphans:
            self._orphans = self._ledger.orphans
            self._drop_orphans()
        return len(over)

    def shrink(self, nbytes_max: int) -> None:
        """End pins, those that end soonest first, until all together hold at most `nbytes_max`."""
        for name in sorted(self._pins, key=lambda name: self._pins[name].until):
            if self.nbytes <= nbytes_max:
                return
            self.let_go(name)

    def _drop_orphans(self) -> None:
        """Give back the slots of blocks that were deleted, or found to be rotten."""
        for name, pin in list(self._pins.items()):
            if not all(slot.indexed for slot in pin.slots):
                kept = pin._replace(slots=tuple(slot for slot in pin.slots if slot.indexed))
                self._pins[name] = kept
                self._unpin([slot for slot in pin.slots if not slot.indexed])

    def _take(self, name: str, pin: Pin) -> None:
        self._pins[name] = pin
        self._ledger.policies.dram.hold(pin.keys)
        for slot in pin.slots:
            if slot not in self._holders:
                self._holders[slot] = 0
                slot.pins += 1
                self.nbytes += padded(slot.nbytes)
            self._holders[slot] += 1

    def _drop(self, pin: Pin) -> None:
        self._unpin(pin.slots)
        self._ledger.policies.dram.let_go(pin.keys)

    def _unpin(self, slots: Sequence[HeldSlot]) -> None:
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                self.nbytes -= padded(slot.nbytes)
                self._ledger.drop_pins((slot,))


def _nbytes(slots: Iterable[HeldSlot]) -> int:
    return sum(padded(slot.nbytes) for slot in slots)
