"""Confidence intervals by resampling. Seeded: the same data give the same intervals.

Requests of one conversation go together (a slow one is slow in every turn), so whole conversations
are drawn, not requests; drawing requests would make intervals too narrow. Where two runs hold the
same conversations, both are resampled by the same draw, so that what they share cancels.
Efron & Tibshirani, An Introduction to the Bootstrap, chapters 8 and 13 (percentile intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
BINS = 4096
STEP = 256  # resamples at a time, which bounds memory


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval; the interval is None where there is too little to say."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Clustered:
    """Values of one run and which cluster (0 ... clusters - 1) each belongs to."""

    values: Floats
    cluster: Counts
    clusters: int

    def draws(self, counts: Counts, percents: Sequence[float | None]) -> list[Floats]:
        """Return the mean (None) or percentile of each resample, an array for each of percents.

        counts: (resamples, clusters), how often each cluster was drawn. NaN where a resample has
        no value. More than BINS values are put into BINS bins of equal count first, so that a
        percentile's rank is off by at most 1 / BINS.
        """
        order = np.argsort(self.values, kind="stable")
        values, cluster = self.values[order], self.cluster[order]
        bins = min(BINS, len(values))
        place = np.arange(len(values)) * bins // len(values)
        inside = np.bincount(place, minlength=bins)
        centres = np.bincount(place, weights=values, minlength=bins) / inside
        cells = np.bincount(cluster * bins + place, minlength=self.clusters * bins)
        table = cells.reshape(self.clusters, bins).astype(np.float64)
        parts = [
            _of_weights(centres, counts[first : first + STEP] @ table, percents)
            for first in range(0, len(counts), STEP)
        ]
        return [np.concatenate(columns) for columns in zip(*parts, strict=True)]

    def value(self, percent: float | None) -> float:
        """Return the mean, or a percentile that interpolates linearly."""
        if percent is None:
            return float(self.values.mean())
        return float(np.percentile(self.values, percent))


def clustered(values: Sequence[float], clusters: Sequence[str], names: Sequence[str]) -> Clustered:
    """Number the clusters in the order of `names`."""
    place = {name: number for number, name in enumerate(names)}
    numbers = np.array([place[name] for name in clusters], dtype=np.int64)
    return Clustered(np.asarray(values, dtype=np.float64), numbers, len(names))


def draw_counts(random: np.random.Generator, clusters: int, resamples: int) -> Counts:
    """Draw clusters with replacement; (resamples, clusters) counts."""
    return random.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples)


def estimate(
    a: Floats, b: Floats, values: tuple[float, float], confidence: float
) -> tuple[Estimate, Estimate]:
    """Return the difference b - a and the ratio b / a of resampled statistics."""
    difference = Estimate(values[1] - values[0], _interval(b - a, confidence))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = b / a
    ratio = values[1] / values[0] if values[0] else float("nan")
    return difference, Estimate(ratio, _interval(ratios, confidence))


def rate_draws(
    ends_s: Floats, amounts: Floats, duration_s: float, *, slices: int, counts: Counts
) -> Floats:
    """Resample a rate: amounts that came in equal slices of time, slices drawn anew.

    counts: (resamples, slices).
    """
    places = np.clip((ends_s / duration_s * slices).astype(np.int64), 0, slices - 1)
    sums = np.bincount(places, weights=amounts, minlength=slices)
    return np.asarray(counts @ sums / duration_s, dtype=np.float64)


def _of_weights(values: Floats, weights: Floats, percents: Sequence[float | None]) -> list[Floats]:
    ends = np.cumsum(weights, axis=1)
    totals = ends[:, -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = weights @ values / totals
    return [
        means if percent is None else _percentiles(values, ends, totals, percent)
        for percent in percents
    ]


def _percentiles(values: Floats, ends: Floats, totals: Floats, percent: float) -> Floats:
    """Interpolate linearly in each row's values, repeated as often as they were drawn."""
    found = np.full(len(ends), np.nan)
    for row, total in enumerate(totals):
        if total:
            rank = (total - 1) * percent / 100
            low = int(rank)
            at = np.searchsorted(ends[row], (low, min(low + 1, total - 1)), side="right")
            first, second = values[at]
            found[row] = first + (second - first) * (rank - low)
    return found


def _interval(draws: Floats, confidence: float) -> tuple[float, float] | None:
    known = draws[np.isfinite(draws)]
    # A statistic that most resamples lack has no interval.
    if len(known) < len(draws) / 2 or not len(known):
        return None
    tail = 50 * (1 - confidence)
    low, high = np.percentile(known, (tail, 100 - tail))
    return float(low), float(high)
