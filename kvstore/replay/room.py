"""The space of tiers that only count bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvstore.model.block import Slot, padded

RECLAIMS = ("punch", "reinsert")
SEGMENTS_MAX = 64
SPARE_SEGMENTS = 16  # one in so many is kept free, so that there is something to win back


class Room:
    """So many bytes in whole pages, anywhere: the arena, and a file tier that punches holes."""

    moved_nbytes = 0

    def __init__(self, capacity_bytes: int) -> None:
        self._left = capacity_bytes
        self._slots: dict[int, Slot] = {}

    def allocate(self, nbytes: int) -> Slot | None:
        slot = self._slots.get(nbytes)
        if slot is None:
            slot = self._slots[nbytes] = Slot(0, 0, padded(nbytes))
        if slot.nbytes > self._left:
            return None
        self._left -= slot.nbytes
        return slot

    def free(self, place: Slot) -> None:
        self._left += place.nbytes


@dataclass(slots=True)
class _Segment:
    """used: bytes appended. live: of these, not freed."""

    used: int = 0
    live: int = 0


class LogRoom:
    """A file tier that wins space back by whole segments: of the emptiest one, what still lives is
    written again. moved_nbytes: so much was.

    Where holes cannot be punched, this is what eviction costs in writes.
    """

    def __init__(self, capacity_bytes: int, frame_nbytes: int) -> None:
        """frame_nbytes: of a large frame."""
        least = max(capacity_bytes // SEGMENTS_MAX, SPARE_SEGMENTS * frame_nbytes)
        self._segment_nbytes = max(1, min(least, capacity_bytes // 2))
        count = max(2, capacity_bytes // self._segment_nbytes)
        self._left = (count - max(1, count // SPARE_SEGMENTS)) * self._segment_nbytes
        self._segments = [_Segment() for _ in range(count)]
        self._open = self._segments[0]
        self._where: dict[int, _Segment] = {}
        self._numbers = itertools.count()
        self.moved_nbytes = 0

    def allocate(self, nbytes: int) -> Slot | None:
        nbytes = padded(nbytes)
        if nbytes > self._left or not self._make_room(nbytes):
            return None
        number = next(self._numbers)
        self._left -= nbytes
        self._open.used += nbytes
        self._open.live += nbytes
        self._where[number] = self._open
        return Slot(number, 0, nbytes)

    def free(self, place: Slot) -> None:
        segment = self._where.pop(place.extent)
        segment.live -= place.nbytes
        self._left += place.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Append to another segment if the open one is full: an empty one, or the emptiest, whose
        frames move first. False: none has so much to win back."""
        if self._open.used + nbytes <= self._segment_nbytes:
            return True
        emptiest = min(self._segments, key=lambda segment: segment.live)
        if emptiest.live + nbytes > self._segment_nbytes:
            return False
        self.moved_nbytes += emptiest.live
        emptiest.used = emptiest.live
        self._open = emptiest
        return True
