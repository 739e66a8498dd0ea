"""How often, and when, blocks were used that are not here any more: 8 bytes each, bounded.

A direct-mapped table: a block's place follows from its key, which is a hash, and a newer ghost
takes the place of an older one. A tag of 24 bits tells two blocks of one place apart; one in
16 million is taken for another, which costs nothing but a wrong guess.

When the table doubles, its segments are not copied: each is in both halves, until somebody writes
there. So no step of growth is large.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvstore.model.block import BlockKey

from_bytes = int.from_bytes
GHOSTS_MIN = 1 << 12  # of a segment
USES_MAX = 255
_TICKS_PER_S = 8
_TICKS_MAX = (1 << 32) - 1


class Ghost(NamedTuple):
    """What is left of a block. used_at: seconds, to an eighth."""

    uses: int
    used_at: float


class Ghosts:
    """At least two places for every block that `note` says there are."""

    def __init__(self) -> None:
        self._segments = [array("Q", bytes(8 * GHOSTS_MIN))]
        self._shared = bytearray(1)  # by segment: it may be in several places

    def __len__(self) -> int:
        """Return how many there is room for."""
        return len(self._segments) * GHOSTS_MIN

    def put(self, key: BlockKey, uses: int, used_at: float, *, blocks: int) -> None:
        """Remember a block that leaves. blocks: how many stay."""
        segments = self._segments
        while 2 * blocks > len(segments) * GHOSTS_MIN:
            segments += segments  # a place's low bits stay: each ghost is in both halves
            self._shared = bytearray(b"\1" * len(segments))
        number = from_bytes(key[-8:], "little")
        ticks = int(used_at * _TICKS_PER_S)
        if not 0 <= ticks <= _TICKS_MAX:
            ticks = min(max(0, ticks), _TICKS_MAX)
        tag = number >> 40 << 40
        uses = uses if uses < USES_MAX else USES_MAX
        place = number & (len(segments) * GHOSTS_MIN - 1)
        at = place // GHOSTS_MIN
        if self._shared[at]:
            segments[at], self._shared[at] = segments[at][:], 0
        segments[at][place % GHOSTS_MIN] = tag | ticks << 8 | uses

    def find(self, key: BlockKey) -> Ghost | None:
        number = from_bytes(key[-8:], "little")
        segments = self._segments
        place = number & (len(segments) * GHOSTS_MIN - 1)
        word = segments[place // GHOSTS_MIN][place % GHOSTS_MIN]
        if not word or (word ^ number) >> 40:
            return None
        return Ghost(word & 0xFF, (word >> 8 & _TICKS_MAX) / _TICKS_PER_S)
