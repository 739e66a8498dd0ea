"""Made-up sessions in their steady state: how many requests they make, and how far those have come
that began before the trace.

A session's requests, its gaps and its tokens are drawn independently of each other. So requests
that continue a session come at a constant rate, and one at time t belongs to a session that began
before the trace if the gap before it is longer than t. The past itself is never simulated.
"""

from __future__ import annotations

import itertools
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.replay.draws import Draws

LIVES = 40_000
PATHS_MAX = 1000
PATHS_MIN = 20
STEPS_MAX = 400_000  # of all paths together
PREFIX_DRAWS = 8  # for each path


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its life a session is. done: requests it has made. left: turns of this visit."""

    done: int
    visit: int
    left: int


class Lives:
    """How many turns many sessions have in each visit. within, returns: continuations of a session
    on average, by a next turn and by a next visit."""

    def __init__(self, visits: Sequence[tuple[int, ...]], requests_max: int) -> None:
        """requests_max: nobody makes more, because the context is full."""
        self._visits = [_cut(each, requests_max) for each in visits]
        within = [sum(each) - len(each) for each in self._visits]
        returns = [len(each) - 1 for each in self._visits]
        self._within = list(itertools.accumulate(within))
        self._returns = list(itertools.accumulate(returns))
        self.within = self._within[-1] / len(visits)
        self.returns = self._returns[-1] / len(visits)
        counts = sorted(sum(each) for each in self._visits)
        at_least = (
            (len(counts) - bisect_right(counts, requests)) / len(counts)
            for requests in range(counts[-1])
        )
        self._mean_up_to = [0.0, *itertools.accumulate(at_least)]

    def mean_requests(self, rooms: Sequence[int]) -> float:
        """Return how many requests a session makes, on average over how many its context allows."""
        means, last = self._mean_up_to, len(self._mean_up_to) - 1
        return sum(means[min(room, last)] for room in rooms) / len(rooms)

    def place(self, draw: random.Random, *, returns: bool) -> Place:
        """Draw where a session is whose next request continues it; returns: begins a visit."""
        ends = self._returns if returns else self._within
        number = draw.randrange(ends[-1])
        life = bisect_right(ends, number)
        number -= ends[life - 1] if life else 0
        done = 0
        for visit, turns in enumerate(self._visits[life]):
            if returns and visit == number + 1:
                return Place(done, visit, turns)
            if not returns and number < turns - 1:
                return Place(done + number + 1, visit, turns - number - 1)
            number -= 0 if returns else turns - 1
            done += turns
        raise AssertionError("a session has as many gaps as were counted")


def _cut(visits: tuple[int, ...], requests_max: int) -> tuple[int, ...]:
    kept, room = [], requests_max
    for turns in visits:
        if room <= 0:
            break
        kept.append(min(turns, room))
        room -= turns
    return tuple(kept)


class Growth:
    """How many tokens prompts grow by, without their shared prefixes: a path for each session."""

    def __init__(
        self,
        first_tokens: Draws,
        answer_tokens: Draws,
        turn_tokens: Draws,
        draw: random.Random,
        *,
        tokens_max: int,
        requests_max: int,
    ) -> None:
        self._paths: list[array[int]] = []
        steps = 0
        while len(self._paths) < PATHS_MIN or (len(self._paths) < PATHS_MAX and steps < STEPS_MAX):
            tokens = max(1, first_tokens.whole(draw))
            path = array("q", (tokens,))
            while tokens <= tokens_max and len(path) < requests_max:
                tokens += max(1, answer_tokens.whole(draw)) + max(1, turn_tokens.whole(draw))
                path.append(tokens)
            self._paths.append(path)
            steps += len(path)
        self._tokens_max = tokens_max
        self.requests_max = max(map(len, self._paths))

    def rooms(self, prefix_tokens: Callable[[random.Random], int]) -> list[int]:
        """Return how many requests fit the context, for many sessions."""
        draw = random.Random(0)
        return [
            max(1, bisect_right(path, self._tokens_max - prefix_tokens(draw)))
            for path in self._paths
            for _ in range(PREFIX_DRAWS)
        ]
