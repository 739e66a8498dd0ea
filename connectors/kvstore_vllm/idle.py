"""Waiting for the cache while the engine has nothing to compute.

An engine whose only request waits for its prefix runs empty steps, as fast as it can, on the cores
that bring the prefix up. A wait of some milliseconds in each leaves them to the cache, and sees
the answer as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore_vllm.lookup import Lookup
from kvstore_vllm.tracked import Tracked

IDLE_WAIT_S = 0.005
"""Of a step without work. A request that comes meanwhile is seen as much later."""


class IdleWait:
    """At most one wait a step, and none while a request is computed. Used by the scheduler's thread
    alone."""

    def __init__(self) -> None:
        self._computing: set[str] = set()
        self._left_s = IDLE_WAIT_S

    def next_step(self, scheduled: Iterable[str]) -> None:
        """Note the requests that a step computes."""
        self._computing = set(scheduled)
        self._left_s = IDLE_WAIT_S

    def ended(self, request_id: str) -> None:
        """Note that a request is over."""
        self._computing.discard(request_id)

    def answered(self, lookup: Lookup | None, requests: Iterable[Tracked]) -> bool:
        """Wait for an answer that is not there yet, if none of the requests is computed or loaded.
        Return whether it has come."""
        if lookup is None or lookup.answered or self._computing or not self._left_s:
            return False
        if any(each.loading for each in requests):
            return False
        wait_s, self._left_s = self._left_s, 0.0
        lookup.wait(wait_s)
        return lookup.answered
