"""What tenants leave of the writes of a day, for those who have more to write. Pure.

Each tenant earns its share in a budget of its own, and saves up half an hour of it. What it earns
beyond that is spare: it goes by weight to those whose budgets are not full. So nobody waits for
its own share, and all together write no more than all shares are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.decide.policy.write_budget import DAY_S, TICK_S, WriteBudget
from kvstore.decide.shares import by_weight


class _Writer(NamedTuple):
    """most: bytes a second that it may have, with what it borrows."""

    budget: WriteBudget
    most: float
    weight: float

    @property
    def more(self) -> float:
        """Bytes a second that it may borrow."""
        return max(0.0, self.most - self.budget.rate)


class SpareWrites:
    """The budgets of all tenants, by name. now: the clock of the budgets."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._at = now()
        self._writers: dict[str, _Writer] = {}

    def set(self, name: str, budget: WriteBudget, nbytes_per_day_max: int, weight: float) -> None:
        """Let a tenant's budget lend and borrow. nbytes_per_day_max: what it may have in all."""
        self._writers[name] = _Writer(budget, nbytes_per_day_max / DAY_S, weight)
        budget.lend = self.lend

    def remove(self, name: str) -> None:
        """Let a tenant, if it is one of these, neither lend nor borrow any more."""
        gone = self._writers.pop(name, None)
        if gone is not None:
            gone.budget.lend = None
            gone.budget.borrow(0.0, 0.0)

    def lend(self) -> None:
        """Divide what is spare since the last time; at most once in TICK_S. O(tenants)."""
        now = self._now()
        passed = now - self._at
        if passed < TICK_S:
            return
        self._at = now
        each = list(self._writers.values())
        weights = [one.weight for one in each]
        spare = sum(one.budget.spare(now) for one in each)
        room = [int(min(one.more * passed, one.budget.missing)) for one in each]
        # Who could do with more is paced by what it may have, whether or not its budget is full.
        wanted = [
            int(min(one.more, max(0.0, one.budget.offered(now) - one.budget.rate))) for one in each
        ]
        parts = by_weight(int(spare), room, weights)
        paces = by_weight(int(spare / passed), wanted, weights)
        for one, nbytes, pace in zip(each, parts, paces, strict=True):
            one.budget.borrow(nbytes, pace)
