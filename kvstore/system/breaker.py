"""Decides when calls are refused at once instead of waiting for somebody who does not answer.

    closed --trip--> open --backoff over--> half open
    half open --probe failed, backoff doubled--> open;  half open --probe succeeded--> closed

Calls pass only when it is closed: the probe is a background task's, so no request ever pays for
finding out that the other side is still dead. Pure: the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 2.0


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One daemon's, or one object store's. trips: how often it has opened."""

    def __init__(
        self,
        now: Callable[[], float],
        backoff_min_s: float = BACKOFF_MIN_S,
        backoff_max_s: float = BACKOFF_MAX_S,
    ) -> None:
        self.trips = 0
        self._now = now
        self._backoff_min_s = self._backoff_s = backoff_min_s
        self._backoff_max_s = backoff_max_s
        self._retry_at: float | None = None  # None: closed

    @property
    def state(self) -> State:
        if self._retry_at is None:
            return State.CLOSED
        return State.HALF_OPEN if self._now() >= self._retry_at else State.OPEN

    @property
    def closed(self) -> bool:
        """Whether calls may pass."""
        return self._retry_at is None

    @property
    def retry_after_s(self) -> float:
        """Seconds until the next probe may start; 0 when it may now."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - self._now())

    def success(self) -> None:
        """Note that there was an answer."""
        self._backoff_s = self._backoff_min_s
        self._retry_at = None

    def trip(self) -> None:
        """Open: the other side is gone, or did not answer in time. No effect when open."""
        if self._retry_at is None:
            self.trips += 1
            self._retry_at = self._now() + self._backoff_s

    def probe_failed(self) -> None:
        """Stay open, and wait twice as long before the next probe."""
        self._backoff_s = min(self._backoff_max_s, 2 * self._backoff_s)
        self._retry_at = self._now() + self._backoff_s
