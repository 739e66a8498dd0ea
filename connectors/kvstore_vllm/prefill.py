"""How fast the engine computes prompts, measured in its workers: what every load competes with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

STEP_TOKENS_MIN = 128
"""Smaller steps are decoding, whose time says nothing of prefill."""
STEPS_MAX = 64


class Step(NamedTuple):
    """What a step computes: tokens of all requests, and for each of them those that are before it
    in its request, all together."""

    tokens: int = 0
    depth_tokens: int = 0


class Computed(NamedTuple):
    """What steps computed, and how long they took. tokens, depth_tokens: as of `Step`."""

    tokens: int = 0
    depth_tokens: int = 0
    seconds: float = 0.0

    @property
    def depth(self) -> float:
        """How many tokens were before one of them, on average."""
        return self.depth_tokens / self.tokens if self.tokens else 0.0

    def and_(self, other: Computed) -> Computed:
        """Return what both computed."""
        return Computed(
            self.tokens + other.tokens,
            self.depth_tokens + other.depth_tokens,
            self.seconds + other.seconds,
        )


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
        self._step = Step()
        self._began = event()
        self._steps: deque[tuple[Step, Event, Event]] = deque(maxlen=STEPS_MAX)

    def begin(self, step: Step) -> None:
        """Note that the model starts to compute a step."""
        self._step = step
        if step.tokens >= STEP_TOKENS_MIN:
            self._began = self._event()
            self._began.record()

    def end(self) -> None:
        """Note that the host has no more to do for the step."""
        if self._step.tokens >= STEP_TOKENS_MIN:
            ended = self._event()
            ended.record()
            self._steps.append((self._step, self._began, ended))
        self._step = Step()

    def take(self) -> Computed:
        """Return what the steps computed that the device has finished since the last call."""
        tokens, depth_tokens, seconds = 0, 0, 0.0
        while self._steps and self._steps[0][2].query():
            step, began, ended = self._steps.popleft()
            tokens += step.tokens
            depth_tokens += step.depth_tokens
            seconds += began.elapsed_time(ended) / 1e3
        return Computed(tokens, depth_tokens, seconds)


def step_of(scheduler_output: Any) -> Step:
    """Return what a step is going to compute."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    begins = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
    begins += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return Step(
        sum(scheduled.values()),
        sum(
            scheduled[name] * before + scheduled[name] * (scheduled[name] - 1) // 2
            for name, before in begins
        ),
    )
