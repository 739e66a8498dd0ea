"""How fast an engine computes prompts, as it has measured it: what every load competes with.

Attention makes a token cost more, the more tokens are before it. An engine that has just computed a
prompt of 128k tokens takes several times as long for a token as it will for a prompt of 8k. So the
pace is a line over the depth: how many tokens are before one, on average.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SAMPLES_MAX = 32
SPAN_TOKENS_MIN = 1024
"""Between the depths of two samples, to tell how the pace depends on it."""


class _Sample(NamedTuple):
    depth: float
    s_per_token: float


class PrefillPace:
    """How fast prompts are computed when nothing disturbs: the lower quartile of the last samples.

    A first step warms up, another shares the machine. Told too slow a pace, loads would be waited
    for longer than computing takes. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._line: tuple[_Sample, float] | None = None  # a point, and what depth adds to it

    def note(self, tokens: int, seconds: float, depth: float = 0.0) -> None:
        """Learn from what one or several large steps computed. depth: how many tokens were before
        one of these, on average."""
        if tokens and seconds > 0:
            self._samples.append(_Sample(depth, seconds / tokens))
            self._line = None

    def s_per_token(self, depth: float = 0.0) -> float:
        """Return the seconds per token for tokens of such a depth; 0 until something was noted."""
        if not self._samples:
            return 0.0
        if self._line is None:
            self._line = self._fitted()
        point, slope = self._line
        if depth >= point.depth:
            return point.s_per_token + slope * (depth - point.depth)
        # Nearer to the start, some of the time is attention's, but no more than all of it.
        least = point.s_per_token * depth / point.depth if slope else point.s_per_token
        return max(point.s_per_token - slope * (point.depth - depth), least)

    def _fitted(self) -> tuple[_Sample, float]:
        """Return a point of the line through what is noted, and its slope."""
        by_depth = sorted(self._samples)
        middle = len(by_depth) // 2
        if by_depth[-1].depth - by_depth[0].depth < SPAN_TOKENS_MIN or not middle:
            return _typical(by_depth), 0.0
        shallow, deep = _typical(by_depth[:middle]), _typical(by_depth[middle:])
        span = deep.depth - shallow.depth
        if span <= 0:
            return shallow, 0.0
        return shallow, max(0.0, (deep.s_per_token - shallow.s_per_token) / span)


def _typical(samples: list[_Sample]) -> _Sample:
    """Return the sample at the lower quartile of the pace."""
    by_pace = sorted(samples, key=lambda each: each.s_per_token)
    return by_pace[(len(by_pace) - 1) // 4]
