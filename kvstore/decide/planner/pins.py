"""Blocks that a hint keeps in the arena for a while. Bounded in bytes, and each pin ends.

A pinned block never leaves for room, so pins are kept out of the walk for a victim as well: one
that had to pass them all would find none. What is deleted is gone at once, for everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner.ledger import Ledger
from kvstore.model.block import BlockKey, padded

PINS_MAX = 4096


@dataclass(slots=True)
class Pin:
    """What one hint holds, until when. pieces: the blocks, as policies were told to hold them.

    orphans: how many slots had lost their block when it began: see `Ledger`.
    """

    until: float
    orphans: int
    pieces: list[tuple[BlockKey, ...]] = field(default_factory=list)
    slots: dict[HeldSlot, None] = field(default_factory=dict)
    blocks: int = 0
    nbytes: int = 0


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
        pin = Pin(until, self._ledger.orphans)
        mine = {s for s in before.slots if self._holders[s] == 1} if before is not None else set()
        if len(self._pins) < PINS_MAX:
            room = all_nbytes_max - (self.nbytes - _nbytes(mine))
            self._add(pin, keys, pin_nbytes_max, room, mine)
        if pin.slots:
            self._pins[name] = pin
        if before is not None:
            self._drop(before)
        return pin.blocks, pin.nbytes

    def extend(
        self,
        name: str,
        keys: Sequence[BlockKey],
        until: float,
        *,
        since: int,
        pin_nbytes_max: int,
        all_nbytes_max: int,
    ) -> tuple[int, int]:
        """Hold what came of a prefix from block `since` on, beside what `name` holds of it: the
        same as `pin`, but it looks at what came alone."""
        pin = self._pins.get(name)
        if pin is None or pin.orphans != self._ledger.orphans or not _is_start(pin, keys):
            return self.pin(
                name, keys, until, pin_nbytes_max=pin_nbytes_max, all_nbytes_max=all_nbytes_max
            )
        pin.until = until
        came = keys[min(since, pin.blocks) :]
        self._add(pin, came, pin_nbytes_max, all_nbytes_max - self.nbytes, (), since=since)
        return pin.blocks, pin.nbytes

    def _add(
        self,
        pin: Pin,
        keys: Sequence[BlockKey],
        pin_nbytes_max: int,
        room_nbytes: int,
        mine: Collection[HeldSlot],
        *,
        since: int = 0,
    ) -> None:
        """Hold blocks from `since` on, as far as the bounds go. Some may be held already, and have
        records that came later. mine: slots that the pin which this one replaces gives back."""
        blocks: list[BlockKey] = []
        added = 0
        for at, key in enumerate(keys, min(since, pin.blocks)):
            block = self._ledger.index.by_key(key)
            records = block.records if block is not None else ()
            found = [r.resident for r in records if r.resident is not None]
            more = [slot for slot in found if slot not in pin.slots]
            nbytes = _nbytes(more)
            new = _nbytes([s for s in more if s not in self._holders or s in mine])
            if not found or pin.nbytes + nbytes > pin_nbytes_max or added + new > room_nbytes:
                break
            added += new
            pin.nbytes += nbytes
            self._hold(pin, more)
            if at >= pin.blocks:
                blocks.append(key)
        if blocks:
            pin.pieces.append(tuple(blocks))
            pin.blocks += len(blocks)
            self._ledger.policies.dram.hold(pin.pieces[-1])

    def let_go(self, name: str) -> int:
        """End a pin; returns how many blocks it held."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        self._drop(pin)
        return pin.blocks

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
        for pin in self._pins.values():
            if not all(slot.indexed for slot in pin.slots):
                gone = [slot for slot in pin.slots if not slot.indexed]
                for slot in gone:
                    del pin.slots[slot]
                self._unpin(gone)

    def _hold(self, pin: Pin, slots: Sequence[HeldSlot]) -> None:
        for slot in slots:
            pin.slots[slot] = None
            if slot not in self._holders:
                self._holders[slot] = 0
                slot.pins += 1
                self.nbytes += padded(slot.nbytes)
            self._holders[slot] += 1

    def _drop(self, pin: Pin) -> None:
        self._unpin(pin.slots)
        for piece in reversed(pin.pieces):
            self._ledger.policies.dram.let_go(piece)

    def _unpin(self, slots: Iterable[HeldSlot]) -> None:
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                self.nbytes -= padded(slot.nbytes)
                self._ledger.drop_pins((slot,))


def _is_start(pin: Pin, keys: Sequence[BlockKey]) -> bool:
    """Say whether a pin holds the first of some blocks: a key stands for all blocks before it."""
    return pin.blocks <= len(keys) and pin.pieces[-1][-1] == keys[pin.blocks - 1]


def _nbytes(slots: Iterable[HeldSlot]) -> int:
    return sum(padded(slot.nbytes) for slot in slots)
