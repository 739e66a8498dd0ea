"""When what failed is tried again."""

from __future__ import annotations

from collections.abc import Callable

RETRY_S = 5.0  # how long after a first failure what could not be written is tried again
RETRY_MAX_S = 60.0  # it doubles up to here: a disk that is gone for long costs nothing


class Retry:
    """When to write again to a disk that takes nothing. at: not before."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pause_s = RETRY_S
        self.at = 0.0

    @property
    def is_due(self) -> bool:
        return self._now() >= self.at

    def note(self, *, refused: bool) -> None:
        """Wait longer each time that a batch is refused, or not at all."""
        if not refused:
            self._pause_s, self.at = RETRY_S, 0.0
        elif self.is_due:  # else a batch begun as early has failed just now
            self.at = self._now() + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
