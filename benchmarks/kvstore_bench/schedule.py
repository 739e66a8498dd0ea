"""Which turn is asked next. Pure: the runner asks, and reports what is finished.

- sequential: each conversation to its end before the next one begins, so its prefix is as recent
  in the engine as it can be.
- round-robin: all first turns, then all second turns, and so on, so that by the time a
  conversation goes on, an engine with little KV space has given its prefix away. Requests start
  strictly in this order.

Whatever the order, a turn waits for the turn before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore_bench.workload import Conversation

Order = Literal["round-robin", "sequential"]


@dataclass(frozen=True, slots=True)
class Job:
    """Ask turn `turn` (from 1) of the conversation at `position` in the workload."""

    position: int
    turn: int


class Schedule:
    """Hand out every turn once, in order; `turns` is the first and last turn to ask, inclusive."""

    def __init__(
        self, conversations: Sequence[Conversation], order: Order, turns: tuple[int, int]
    ) -> None:
        first, last = turns
        jobs = [
            Job(position, turn)
            for position, conversation in enumerate(conversations)
            for turn in range(first, min(last, conversation.turns) + 1)
        ]
        if order == "round-robin":
            jobs.sort(key=lambda job: (job.turn, job.position))
        self._waiting = deque(jobs)
        self._strict = order == "round-robin"
        self._busy: set[int] = set()

    def __len__(self) -> int:
        """Return how many jobs have not been handed out."""
        return len(self._waiting)

    def take(self) -> Job | None:
        """Return the next job that may start now; None if it must wait for `finished`."""
        candidates = list(self._waiting)[:1] if self._strict else list(self._waiting)
        for job in candidates:
            if job.position not in self._busy:
                self._waiting.remove(job)
                self._busy.add(job.position)
                return job
        return None

    def finished(self, job: Job) -> None:
        """Let the conversation's next turn start."""
        self._busy.discard(job.position)

    def abandon(self, position: int) -> int:
        """Forget the rest of a conversation; return how many turns that were."""
        kept = [job for job in self._waiting if job.position != position]
        dropped = len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        return dropped
