"""Whether the daemon is alive, and whether it should be asked: for /healthz, /readyz and gRPC.

The event loop says so twice a second, and other threads read what it said last: a loop that hangs
is found by its silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

BEAT_S = 0.5
HANG_S = 5.0


class _Beat(NamedTuple):
    """What the loop said, and when. One object, so that a thread never sees half of it."""

    at: float
    trouble: str


class Health:
    """Ready while `trouble` returns "". `changed` is told of every change, on the event loop."""

    def __init__(
        self,
        trouble: Callable[[], str],
        changed: Callable[[bool], Awaitable[None]],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trouble = trouble
        self._changed = changed
        self._now = now
        self._last = _Beat(now(), trouble())
        self._told: bool | None = None

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Say now how the daemon is."""
        self._last = _Beat(self._now(), self._trouble())
        ready = not self._last.trouble
        if ready is not self._told:
            self._told = ready
            await self._changed(ready)

    # These two may be called by any thread.

    def not_alive(self) -> str:
        """Return why the daemon should be restarted, "" if it should not."""
        silent_s = self._now() - self._last.at
        return f"the event loop did not answer for {silent_s:.1f} s" if silent_s > HANG_S else ""

    def not_ready(self) -> str:
        """Return why nothing should be asked now, "" if it may be."""
        return self.not_alive() or self._last.trouble
