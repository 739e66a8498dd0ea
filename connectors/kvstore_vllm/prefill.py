"""How fast the engine computes prompts, measured in its workers: what every load competes with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

STEP_TOKENS_MIN = 128
"""Smaller steps are decoding, whose time says nothing of prefill."""
STEPS_MAX = 64
SAMPLES_MAX = 16


class Event(Protocol):
    """A moment on the device, as `torch.cuda.Event` has it."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Return whether the device has come to it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds until `end_event`."""


class HostEvent:
    """A moment on the host."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        return 1e3 * (end_event._at - self._at)


class StepClock:
    """Times the large steps of a worker without waiting for its device."""

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._tokens = 0
        self._began = event()
        self._steps: deque[tuple[int, Event, Event]] = deque(maxlen=STEPS_MAX)

    def begin(self, tokens: int) -> None:
        """Note that the model starts to compute a step."""
        self._tokens = tokens
        if tokens >= STEP_TOKENS_MIN:
            self._began = self._event()
            self._began.record()

    def end(self) -> None:
        """Note that the host has no more to do for the step."""
        if self._tokens >= STEP_TOKENS_MIN:
            ended = self._event()
            ended.record()
            self._steps.append((self._tokens, self._began, ended))
        self._tokens = 0

    def take(self) -> tuple[int, float]:
        """Return tokens and seconds of the steps the device has finished since the last call."""
        tokens, seconds = 0, 0.0
        while self._steps and self._steps[0][2].query():
            computed, began, ended = self._steps.popleft()
            tokens += computed
            seconds += began.elapsed_time(ended) / 1e3
        return tokens, seconds


class PrefillPace:
    """How fast prompts are computed when nothing disturbs: the lower quartile of the last samples.

    A first step warms up, another shares the machine. Told too slow a pace, loads would be waited
    for longer than computing takes.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)

    @property
    def s_per_token(self) -> float:
        """Seconds per token; 0 until a large step was seen."""
        return sorted(self._samples)[(len(self._samples) - 1) // 4] if self._samples else 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from what one or several large steps computed."""
        if tokens and seconds > 0:
            self._samples.append(seconds / tokens)
