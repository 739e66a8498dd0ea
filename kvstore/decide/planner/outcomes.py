"""The outcomes of the last requests, for `kvstore explain`. Bounded; the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

from kvstore.decide.planner.leases import SessionId
from kvstore.model.outcome import Outcome, is_request


@dataclass(slots=True)
class _Kept:
    outcome: Outcome
    at: float
    lease: tuple[SessionId, int]


class Outcomes:
    """One outcome a request: a request that asks again replaces its own."""

    def __init__(self, requests_max: int, now: Callable[[], float]) -> None:
        self._requests_max = requests_max
        self._now = now
        self._kept: OrderedDict[tuple[SessionId, str | int], _Kept] = OrderedDict()
        self._by_lease: dict[tuple[SessionId, int], _Kept] = {}
        self._nameless = count()

    def note(self, session: SessionId, outcome: Outcome, lease_id: int) -> None:
        """Remember how a request was answered, under its id or, without one, on its own."""
        name = (session, outcome.request_id or next(self._nameless))
        before = self._kept.pop(name, None)
        if before is not None:
            self._by_lease.pop(before.lease, None)
            outcome = replace(outcome, asks=before.outcome.asks + 1)
        kept = self._kept[name] = _Kept(outcome, self._now(), (session, lease_id))
        if lease_id:
            self._by_lease[kept.lease] = kept
        if len(self._kept) > self._requests_max:
            _, oldest = self._kept.popitem(last=False)
            self._by_lease.pop(oldest.lease, None)

    def released(self, session: SessionId, lease_id: int, *, held: bool) -> None:
        """Note how a request's lease ended: one reader that came too late makes it expired."""
        kept = self._by_lease.get((session, lease_id))
        if kept is not None and kept.outcome.lease != "expired":
            kept.outcome = replace(kept.outcome, lease="held" if held else "expired")

    def find(self, request_id: str, limit: int) -> list[Outcome]:
        """Return outcomes whose request id starts with `request_id`, newest first.

        Those that are this very request's come before the others. Every id starts with "".
        """
        matching: Iterator[_Kept] = (
            kept
            for kept in reversed(self._kept.values())
            if kept.outcome.request_id.startswith(request_id)
        )
        if request_id:
            matching = iter(
                sorted(
                    matching, key=lambda kept: not is_request(request_id, kept.outcome.request_id)
                )
            )
        now = self._now()
        return [replace(kept.outcome, age_s=now - kept.at) for kept in islice(matching, limit)]
