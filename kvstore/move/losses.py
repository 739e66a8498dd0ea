"""What a flush has to tell of: records that are not durable, and nobody is going to write them."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.decide.planner import Planner

TOLD_S = 300.0  # a flush does not say who asks: so long, others may not have heard of a loss


class Losses:
    """Records that left the arena before they were ever durable."""

    def __init__(self, planner: Planner, now: Callable[[], float]) -> None:
        self._planner = planner
        self._now = now
        self._told = 0  # records, ever, that some flush has told of
        self._told_until = float("-inf")

    def tell(self) -> bool:
        """Say whether to tell of a loss: the first that asks after it is told, and all others for
        TOLD_S from then on."""
        lost = self._lost
        if lost > self._told:
            self._told, self._told_until = lost, self._now() + TOLD_S
        return self._now() < self._told_until

    @property
    def _lost(self) -> int:
        """Records, ever. Of those that the write budget kept out it is not known which have left:
        it is as many as may have."""
        counts = self._planner.counts
        return max(counts.never_durable, min(counts.lost, counts.never_durable + counts.unwritten))
