"""Which turn is asked next. Pure: the driver asks, and reports what is finished.

- round-robin: all first turns, then all second turns, and so on, so that by the time a
  conversation goes on, an engine with little KV space has given its prefix away. Requests start
  strictly in this order.
- barrier: the same, and no turn starts before all turns of the round before it have ended.
- sequential: each conversation to its end before the next one begins, so its prefix is as recent
  in the engine as it can be.
- fifo, random: of the conversations that may go on, the one that waits longest, or any.

Whatever the order, a turn waits for the turn before it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvstore_bench.chat.workloads.workload import Dialogue

Order = Literal["round-robin", "sequential", "fifo", "random", "barrier"]
ORDERS: tuple[Order, ...] = ("round-robin", "sequential", "fifo", "random", "barrier")


@dataclass(frozen=True, slots=True)
class Job:
    """Ask turn `turn` (from 1) of the dialogue at `position` in the workload."""

    position: int
    turn: int


class Schedule(Protocol):
    """Hands out every turn once."""

    def __len__(self) -> int:
        """Return how many jobs have not been handed out."""
        ...

    def take(self) -> Job | None:
        """Return the next job that may start now; None if it must wait for `finished`."""
        ...

    def finished(self, job: Job) -> None:
        """Let the dialogue's next turn start."""
        ...

    def abandon(self, position: int) -> int:
        """Forget the rest of a dialogue; return how many turns that were."""
        ...


def schedule(
    dialogues: Sequence[Dialogue], order: Order, turns: tuple[int, int], *, seed: int = 0
) -> Schedule:
    """Make the schedule of an order; `turns` is the first and last turn to ask, inclusive."""
    first, last = turns
    spans = [range(first, min(last, dialogue.turns) + 1) for dialogue in dialogues]
    if order in ("round-robin", "barrier"):
        return _Rounds(spans, barrier=order == "barrier")
    return _Ready(spans, order, random.Random(f"kvstore-bench/order/{seed}"))


class _Rounds:
    """A fixed order: only its head may start."""

    def __init__(self, spans: Sequence[range], *, barrier: bool) -> None:
        jobs = [Job(position, turn) for position, span in enumerate(spans) for turn in span]
        jobs.sort(key=lambda job: (job.turn, job.position))
        self._waiting = deque(jobs)
        self._barrier = barrier
        self._busy: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> Job | None:
        if not self._waiting or not self._may_start(self._waiting[0]):
            return None
        job = self._waiting.popleft()
        self._busy[job.position] = job.turn
        return job

    def _may_start(self, job: Job) -> bool:
        if self._barrier:
            return all(turn == job.turn for turn in self._busy.values())
        return job.position not in self._busy

    def finished(self, job: Job) -> None:
        self._busy.pop(job.position, None)

    def abandon(self, position: int) -> int:
        kept = [job for job in self._waiting if job.position != position]
        dropped = len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        return dropped


class _Ready:
    """Positions that may go on wait in a heap: by position, by time of readiness, or by lot."""

    def __init__(self, spans: Sequence[range], order: Order, lots: random.Random) -> None:
        self._left = {position: deque(span) for position, span in enumerate(spans) if span}
        self._waiting = sum(len(span) for span in spans)
        self._order = order
        self._lots = lots
        self._count = 0
        self._ready: list[tuple[float, int]] = []
        for position in self._left:
            self._put(position)

    def __len__(self) -> int:
        return self._waiting

    def take(self) -> Job | None:
        while self._ready:
            _, position = heapq.heappop(self._ready)
            if self._left[position]:
                self._waiting -= 1
                return Job(position, self._left[position].popleft())
        return None

    def finished(self, job: Job) -> None:
        if self._left[job.position]:
            self._put(job.position)

    def abandon(self, position: int) -> int:
        dropped = len(self._left.get(position, ()))
        self._left[position] = deque()
        self._waiting -= dropped
        return dropped

    def _put(self, position: int) -> None:
        self._count += 1
        ranks = {"sequential": position, "fifo": self._count, "random": self._lots.random()}
        heapq.heappush(self._ready, (ranks[self._order], position))
