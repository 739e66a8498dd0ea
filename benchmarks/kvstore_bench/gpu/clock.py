"""Times of work on a device: sides of a comparison take turns, medians count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

HEAD_START_CYCLES = 20_000_000  # about 10 ms


def alternated(
    sides: Mapping[str, Callable[[], Any]], rounds: int, seconds_of: Callable[[Any], float]
) -> dict[str, float]:
    """Return the median seconds of each side, the sides taking turns, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            took = seconds_of(work)
            if number:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def host_seconds(work: Callable[[], Any]) -> float:
    """Return how long `work` takes, until the device, if there is one, has done it."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def device_seconds(work: Callable[[], Any]) -> float:
    """Return how long the device takes for what `work` puts on the current stream.

    The stream is kept busy meanwhile: else it would wait for the host, which is not measured.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
