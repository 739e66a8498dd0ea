"""Threads that send to peers rest while engines of this host copy: those come first.

A thread that sends 4 MiB out of the arena is busy for a millisecond or two, as an engine's copy
is. With a few such threads on a small host an engine would get a fifth of the processors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

CORES_SHARE = 12  # while engines copy, all that send together use one part of the processors
REST_S_MAX = 0.1  # at a time; a peer may be silent for longer


class Yielding:
    """How long a thread rests after some work. busy: says, in any thread, whether engines copy."""

    def __init__(self, busy: Callable[[], bool], cores: int | None = None) -> None:
        self._busy = busy
        self._cores = cores or len(os.sched_getaffinity(0))

    def rest_s(self, worked_s: float, senders: int) -> float:
        """Return seconds to rest. worked_s: of processor time. senders: how many threads send."""
        if not self._busy():
            return 0.0
        times = max(1, senders) * CORES_SHARE / self._cores - 1
        return min(REST_S_MAX, worked_s * max(0.0, times))


class Turns:
    """The work and the rests of one thread. senders: how many there are, asked each time."""

    def __init__(self, yielding: Yielding, senders: Callable[[], int]) -> None:
        self._yielding = yielding
        self._senders = senders
        self._at = time.thread_time()

    def rest(self) -> None:
        """Rest for what was done since the last rest."""
        now = time.thread_time()
        rest_s = self._yielding.rest_s(now - self._at, self._senders())
        self._at = now
        if rest_s:
            time.sleep(rest_s)
