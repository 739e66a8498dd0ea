"""Who watches requests as they are answered: `kvstore monitor`, and the page.

An answer only goes into a bounded queue, if somebody watches. Who does not keep up misses some,
which is counted and told; no engine ever waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvstore.metrics import Metrics
from kvstore.model.block import NamespaceId
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.model.outcome import REQUEST_ID_CHARS_MAX, Outcome
from kvstore.store.answers import Answer, Answers

MONITORS_MAX = 8
QUEUE_MAX = 2048  # some 2 MiB
BATCH_MAX = 256
GATHER_S = 0.1  # an event loop that is busy is not woken for every answer
TIERS = ("dram", "file", "object", "peer", "pool")
KINDS = ("acquire", "save")


class Watched(NamedTuple):
    """at: seconds since the epoch."""

    at: float
    answer: Answer


class Filter(NamedTuple):
    """Which answers are watched. request_id: the start of it. tier: that some of it was served
    from. kind: "" for both. Raises InvalidRequest where `checked`."""

    namespace_id: NamespaceId | None = None
    request_id: str = ""
    tier: str = ""
    misses_only: bool = False
    kind: str = ""

    def checked(self) -> Filter:
        if self.tier not in ("", *TIERS) or self.kind not in ("", *KINDS):
            raise InvalidRequest(
                f"tier is one of {', '.join(TIERS)}, and kind one of {', '.join(KINDS)}"
            )
        if len(self.request_id) > REQUEST_ID_CHARS_MAX:
            raise InvalidRequest(f"a request id has at most {REQUEST_ID_CHARS_MAX} characters")
        return self

    def takes(self, answer: Answer) -> bool:
        """Say whether an answer is watched."""
        outcome = answer.outcome
        if self.namespace_id not in (None, outcome.namespace_id):
            return False
        is_save = answer.saved is not None
        if self.kind and is_save is not (self.kind == "save"):
            return False
        if not outcome.request_id.startswith(self.request_id):
            return False
        if is_save:
            return not (self.misses_only or self.tier)
        if self.misses_only and outcome.ending is None:
            return False
        return not self.tier or any(tier == self.tier for _, _, tier in ranges(outcome))


class Monitor:
    """The queue of one who watches."""

    def __init__(self, metrics: Metrics, wanted: Filter) -> None:
        self.dropped = 0
        self._metrics = metrics
        self._wanted = wanted
        self._queue: deque[Watched] = deque()
        self._more = asyncio.Event()
        self._closed = False

    def note(self, at: float, answer: Answer) -> None:
        """Take an answer, if it is wanted and there is room. Never waits."""
        if not self._wanted.takes(answer):
            return
        full = len(self._queue) >= QUEUE_MAX
        self._metrics.monitored.labels("dropped" if full else "sent").inc()
        if full:
            self.dropped += 1
            return
        self._queue.append(Watched(at, answer))
        self._more.set()

    def close(self) -> None:
        """End `batches` when all is taken."""
        self._closed = True
        self._more.set()

    async def batches(self) -> AsyncIterator[list[Watched]]:
        """Yield what comes, until it is closed."""
        while True:
            await self._more.wait()
            if not self._closed:
                await asyncio.sleep(GATHER_S)
            self._more.clear()
            while self._queue:
                yield [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
            if self._closed:
                return


class Monitors:
    """All who watch one store. They end when it is closed."""

    def __init__(self, metrics: Metrics, answers: Answers) -> None:
        self._metrics = metrics
        self._answers = answers
        self._monitors: set[Monitor] = set()
        self._closed = False

    @contextmanager
    def watch(self, wanted: Filter) -> Iterator[Monitor]:
        """Watch for as long as the context lasts. Raises InvalidRequest, and Unavailable if too
        many do."""
        monitor = Monitor(self._metrics, wanted.checked())
        if self._closed or len(self._monitors) >= MONITORS_MAX:
            raise Unavailable(f"{MONITORS_MAX} monitors are under way, or the daemon ends")
        self._monitors.add(monitor)
        if len(self._monitors) == 1:
            self._answers.listeners.append(self._note)
        try:
            yield monitor
        finally:
            self._monitors.discard(monitor)
            if not self._monitors:
                self._answers.listeners.remove(self._note)

    def close(self) -> None:
        """End all: they would keep a daemon from draining."""
        self._closed = True
        for monitor in self._monitors:
            monitor.close()

    def _note(self, answer: Answer) -> None:
        at = time.time()
        for monitor in self._monitors:
            monitor.note(at, answer)


def ranges(outcome: Outcome) -> list[tuple[int, int, str]]:
    """Return where the blocks of a prefix were, in its order, as (begin, end, tier): "engine" for
    those that the asker has itself, "" for those that were not served.

    The start of a prefix is where it is used most, so it is read as the tiers are ordered.
    """
    slower = outcome.file_blocks + outcome.object_blocks + outcome.peer_blocks
    slower += outcome.pool_blocks
    served = max(0, outcome.hit_blocks - outcome.skip_blocks)
    counts = (
        (outcome.skip_blocks, "engine"),
        (max(0, served - slower), "dram"),
        (outcome.file_blocks, "file"),
        (outcome.peer_blocks, "peer"),
        (outcome.pool_blocks, "pool"),
        (outcome.object_blocks, "object"),
        (max(0, outcome.asked_blocks - outcome.skip_blocks - served), ""),
    )
    found: list[tuple[int, int, str]] = []
    begin = 0
    for count, tier in counts:
        if count:
            found.append((begin, begin + count, tier))
            begin += count
    return found
