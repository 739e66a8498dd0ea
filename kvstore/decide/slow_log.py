"""The calls and moves that took longest, with what they waited for: for `kvstore slow`.

What is fast pays for one comparison. Memory is bounded: the longest of each kind, of one day.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from kvstore.model.block import NamespaceId

KINDS = ("acquire", "load", "save")
KEPT_MAX = 64  # of each kind
KEPT_S = 86400.0
WAITS_MAX = 16
NOTHING: Mapping[str, float] = MappingProxyType({})


class Slow(NamedTuple):
    """One that took long. at: its end, on the clock of the log. waits: seconds, by what was waited
    for, some at the same time. blocks: asked for, loaded or saved. result: how it ended."""

    took_s: float
    at: float
    kind: str
    waits: Mapping[str, float]
    blocks: int
    nbytes: int
    namespace_id: NamespaceId | None
    request_id: str
    client: str
    session_id: str
    result: str


class Waits:
    """How long something waited, by what for: `with waits.on("file"): ...`."""

    __slots__ = ("_now", "seconds")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    def on(self, what: str) -> _Waiting:
        """Count the time of the context."""
        return _Waiting(self, what, self._now)


class _Waiting:
    __slots__ = ("_began", "_now", "_waits", "_what")

    def __init__(self, waits: Waits, what: str, now: Callable[[], float]) -> None:
        self._waits, self._what, self._now = waits, what, now

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = self._waits.seconds
        if self._what in seconds or len(seconds) < WAITS_MAX:
            seconds[self._what] = seconds.get(self._what, 0.0) + self._now() - self._began


class SlowLog:
    """The longest of each kind, the shortest of them first. now: its clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._kept: dict[str, list[Slow]] = {kind: [] for kind in KINDS}
        self._least: dict[str, float] = dict.fromkeys(KINDS, -1.0)  # to be one of them
        self._began = now()

    def note(
        self,
        kind: str,
        took_s: float,
        waits: Mapping[str, float] = NOTHING,
        *,
        blocks: int,
        nbytes: int = 0,
        namespace_id: NamespaceId | None = None,
        request_id: str = "",
        client: str = "",
        session_id: str = "",
        result: str = "",
    ) -> None:
        """Remember something that is over, if it is one of the longest of its kind."""
        if took_s <= self._least[kind]:
            return
        kept, now = self._kept[kind], self._now()
        whose = (namespace_id, request_id, client, session_id)
        insort(kept, Slow(took_s, now, kind, dict(waits), blocks, nbytes, *whose, result), key=_key)
        if len(kept) > KEPT_MAX:
            del kept[0]
        if len(kept) == KEPT_MAX:
            self._least[kind] = kept[0].took_s

    def tick(self) -> None:
        """Forget what is older than a day."""
        before = self._now() - KEPT_S
        for kind, kept in self._kept.items():
            if kept and min(each.at for each in kept) < before:
                kept[:] = [each for each in kept if each.at >= before]
                self._least[kind] = -1.0 if len(kept) < KEPT_MAX else kept[0].took_s

    @property
    def kept_s(self) -> float:
        """How far back it goes."""
        return min(KEPT_S, self._now() - self._began)

    def find(self, kind: str = "", over_s: float = 0.0) -> list[Slow]:
        """Return those of a kind, "" for all, that took at least so long, the longest first."""
        self.tick()
        found = (each for of, kept in self._kept.items() if kind in ("", of) for each in kept)
        return sorted((e for e in found if e.took_s >= over_s), key=_key, reverse=True)

    def reset(self) -> None:
        """Forget all."""
        for kept in self._kept.values():
            kept.clear()
        self._least = dict.fromkeys(KINDS, -1.0)
        self._began = self._now()


def _key(slow: Slow) -> float:
    return slow.took_s
