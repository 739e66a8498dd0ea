"""Which prefixes are written to flash when its endurance allows only so much a day."""

from __future__ import annotations

from collections.abc import Callable

DAY_S = 86400.0
BURST_S = 1800.0
"""Of the budget: what may be written at once after a quiet time, and what may be overdrawn to
finish a prefix. A day thus sees at most a 24th more than its budget."""


class WriteBudget:
    """A token bucket of bytes, asked per prefix.

    A prefix is begun only while something is left, and then goes on on credit: half of it would be
    worth much less than all of it, and a later turn adds to what the disk has already.
    """

    def __init__(self, nbytes_per_day: int, now: Callable[[], float]) -> None:
        self._rate = nbytes_per_day / DAY_S
        self._burst = self._rate * BURST_S
        self._left = self._burst
        self._now = now
        self._at = now()

    def admits(self, nbytes: int, *, continues: bool) -> bool:
        """Return whether to write a record, and spend it. continues: the disk has, or is getting,
        what comes before it."""
        now = self._now()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left <= (-self._burst if continues else 0.0):
            return False
        self._left -= nbytes
        return True
