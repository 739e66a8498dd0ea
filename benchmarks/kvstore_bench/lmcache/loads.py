"""What loads brought, over a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

AGAIN_S = 5.0
AGAIN_EVERY_S = 0.05


class Loaded(NamedTuple):
    """What became of one request: chunks that were found, and of these that were wrong."""

    found: int
    wrong: int


@dataclass(slots=True)
class Found:
    """Chunks, over all loads. late: missed at first, because a lookup was given up at its deadline,
    or the daemon had only just come back; lost: not found in AGAIN_S either, by who was killed.
    wrong: in any load, also in one that was repeated."""

    verified: int = 0
    late: int = 0
    wrong: int = 0
    lost: dict[str, int] = field(default_factory=dict)

    def load(self, once: Callable[[], Loaded]) -> Loaded:
        """Load a request once, and count what was wrong."""
        loaded = once()
        self.wrong += loaded.wrong
        return loaded

    def load_all(self, once: Callable[[], Loaded], chunks: int, again_s: float = AGAIN_S) -> int:
        """Load a request of so many chunks, again and again until all were found; returns how many
        were not found in `again_s` seconds."""
        found, wrong = self.load(once)
        self.late += chunks - found
        until_s = time.monotonic() + again_s
        while found < chunks and time.monotonic() < until_s:
            time.sleep(AGAIN_EVERY_S)
            found, wrong = self.load(once)
        self.verified += found - wrong
        return chunks - found
