"""An engine comes and goes. One that comes back empty is not a fleet that died.

While an engine is away, nobody can tell it that he is there. So members that vanish while it is
away, or soon after its return, are not gone for that: see `held.Held`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Outage:
    """Since when an engine is out of reach, and since when it is back. name: for the log."""

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        self.error = ""  # why it is away
        self._name = name
        self._now = now
        self._away_since: float | None = None
        self._returned_at = float("-inf")

    @property
    def away_s(self) -> float | None:
        """For how long it has been out of reach; None: it answers."""
        return None if self._away_since is None else self._now() - self._away_since

    def begin(self) -> None:
        """Take it for away, until it answers: nothing was asked yet."""
        self._away_since = self._now()

    def lost(self, error: Exception) -> None:
        """Note that it did not answer."""
        if self._away_since is None:
            self._away_since = self._now()
        if not self.error:
            logger.warning("%s=away error=%s", self._name, error)
        self.error = str(error)

    def reached(self) -> bool:
        """Note that it answered. True: it was away before."""
        away_s, self.error = self.away_s, ""
        if away_s is None:
            return False
        logger.info("%s=answers after_s=%.1f", self._name, away_s)
        self._away_since, self._returned_at = None, self._now()
        return True

    def doubt(self) -> None:
        """Note that it has lost something: it was away, or emptied, and nobody noticed."""
        self._returned_at = self._now()

    def shields(self, after_s: float) -> bool:
        """Tell whether who vanishes now may live: it is away, or has returned within `after_s`."""
        return self._away_since is not None or self._now() - self._returned_at <= after_s
