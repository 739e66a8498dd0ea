"""Which blocks somebody has announced to come back for, and when. Bounded; O(log n) a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvstore.model.block import BlockKey

EXPECTED_MAX = 1 << 17
OVERDUE_S = 30.0
"""For so long a block is still believed to be wanted in a moment; then the hint was wrong."""


class Expected:
    """Blocks and the times they are expected at, in seconds of one clock."""

    def __init__(self) -> None:
        self.times: dict[BlockKey, float] = {}  # to look at
        self._order: list[tuple[float, BlockKey]] = []

    def add(self, key: BlockKey, at: float) -> bool:
        """Expect a block; False if too many are expected already."""
        if key not in self.times and len(self._order) >= EXPECTED_MAX:
            return False
        if self.times.get(key) != at:
            self.times[key] = at
            heappush(self._order, (at, key))
            self._trim()
        return True

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks: they were used, or have left."""
        for key in keys:
            self.times.pop(key, None)

    def overdue(self, now: float) -> Iterator[BlockKey]:
        """Take the blocks off that nobody came back for."""
        order = self._order
        while order and order[0][0] + OVERDUE_S < now:
            at, key = heappop(order)
            if self.times.get(key) == at:
                del self.times[key]
                yield key

    def rate(self, at: float, now: float) -> float:
        """Return the hits per second of room held for a block that is expected at `at`."""
        return 1.0 / max(1.0, at - now)

    def _trim(self) -> None:
        """Drop what was forgotten from the order, once it is most of it."""
        if len(self._order) > 2 * len(self.times) + 64:
            self._order = sorted((at, key) for key, at in self.times.items())
