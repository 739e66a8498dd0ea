"""The keys that left last, why and when, so that a miss can be explained. Bounded; no payload."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvstore.model.block import BlockKey
from kvstore.model.outcome import Reason


class Departures:
    """A memory of `keys_max` keys, about 300 bytes each; the oldest are forgotten first."""

    def __init__(self, keys_max: int, now: Callable[[], float]) -> None:
        self._keys_max = keys_max
        self._now = now
        self._left: OrderedDict[BlockKey, tuple[Reason, float]] = OrderedDict()
        self._complete_since = now()

    def note(self, key: BlockKey, reason: Reason) -> None:
        """Note that some part of a block is in no tier any more."""
        self._left[key] = reason, self._now()
        self._left.move_to_end(key)
        if len(self._left) > self._keys_max:
            _, (_, self._complete_since) = self._left.popitem(last=False)

    def find(self, key: BlockKey) -> tuple[Reason, float] | None:
        """Return why a block left and how many seconds ago, None if nothing is known of it."""
        left = self._left.get(key)
        return (left[0], self._now() - left[1]) if left is not None else None

    @property
    def reach_s(self) -> float:
        """Seconds for which no departure has been forgotten."""
        return self._now() - self._complete_since
