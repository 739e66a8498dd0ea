"""How long a put or a get may wait for the daemon, in all the calls that it is cut into."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Patience:
    """Of one put or get. left_s: what its next call may wait. Only waiting spends it, not moving
    bytes: what is large is not refused for that."""

    def __init__(self, wait_s: float) -> None:
        self.left_s = wait_s

    @contextmanager
    def waiting(self, busy_s: float = 0.0) -> Iterator[float]:
        """Yield what a call may wait, and spend what it takes beyond `busy_s`."""
        began = time.monotonic()
        try:
            yield self.left_s
        finally:
            self.spend(time.monotonic() - began - busy_s)

    def spend(self, seconds: float) -> None:
        self.left_s = max(0.0, self.left_s - max(0.0, seconds))

    def end(self) -> None:
        """Spend all that is left: there is no room."""
        self.left_s = 0.0
