"""The statistics of the demo: medians with their spread, and a bound on a paired ratio."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Spread:
    """Where values lie, in their unit; p25 to p75 is the interquartile range."""

    count: int
    median: float
    p25: float
    p75: float
    mean: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Describe one or more values; quartiles interpolate linearly."""
    ordered = sorted(values)
    p25, median, p75 = (_quantile(ordered, part) for part in (0.25, 0.5, 0.75))
    return Spread(
        len(ordered), median, p25, p75, statistics.fmean(ordered), ordered[0], ordered[-1]
    )


def ratio_of_medians(measured: Mapping[Key, float], base: Mapping[Key, float]) -> float | None:
    """Divide the medians over the keys that both have; None if they share none."""
    shared = measured.keys() & base.keys()
    if not shared:
        return None
    return statistics.median(measured[key] for key in shared) / statistics.median(
        base[key] for key in shared
    )


def ratio_upper_bound(
    pairs: Sequence[tuple[float, float]],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> float:
    """Bound the geometric mean of a / b over pairs (a, b) from above.

    Percentile bootstrap over pairs, one-sided: both of a pair were measured next to each other, so
    what drifts on the machine cancels within it.
    """
    logs = [math.log(a / b) for a, b in pairs]
    generator = random.Random(seed)
    means = sorted(statistics.fmean(generator.choices(logs, k=len(logs))) for _ in range(resamples))
    return math.exp(_quantile(means, confidence))


def geometric_mean_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the geometric mean of a / b over pairs (a, b)."""
    return math.exp(statistics.fmean(math.log(a / b) for a, b in pairs))


def _quantile(ordered: Sequence[Any], part: float) -> float:
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
