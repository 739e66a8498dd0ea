"""The statistics of the demo."""

import random

import pytest

from kvstore_bench.demo.ratios import (
    geometric_mean_ratio,
    ratio_of_medians,
    ratio_upper_bound,
    spread,
)


def test_a_bound_on_equal_pairs_is_their_ratio() -> None:
    assert ratio_upper_bound([(1.1, 1.0)] * 12) == pytest.approx(1.1)


def test_a_bound_lies_above_the_mean_and_within_the_worst_pair() -> None:
    pairs = [(1.0, 1.0), (1.2, 1.0), (0.9, 1.0), (1.1, 1.0), (1.0, 1.0)]
    bound = ratio_upper_bound(pairs)
    assert geometric_mean_ratio(pairs) < bound < 1.2


def test_a_drift_of_the_machine_cancels_within_pairs() -> None:
    steady = [(1.05, 1.0), (0.98, 1.0), (1.01, 1.0)]
    drifting = [(a * slow, b * slow) for (a, b), slow in zip(steady, (1, 3, 7), strict=True)]
    assert ratio_upper_bound(drifting) == pytest.approx(ratio_upper_bound(steady))


def test_a_bound_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    covered = 0
    for trial in range(200):
        pairs = [(draw.lognormvariate(0.02, 0.05), 1.0) for _ in range(12)]
        covered += ratio_upper_bound(pairs, resamples=300, seed=trial) >= 1.0202
    assert 170 <= covered <= 200  # 95 % by its name; a bootstrap of 12 pairs is a little optimistic


def test_a_bound_is_the_same_every_time() -> None:
    pairs = [(1.0, 0.9), (1.1, 1.0), (0.8, 1.0)]
    assert ratio_upper_bound(pairs) == ratio_upper_bound(pairs)


def test_medians_are_compared_over_shared_turns_only() -> None:
    assert ratio_of_medians({1: 2.0, 2: 4.0, 3: 1000.0}, {1: 20.0, 2: 40.0}) == pytest.approx(0.1)
    assert ratio_of_medians({1: 1.0}, {2: 1.0}) is None


def test_spread_of_one_value_is_that_value() -> None:
    seen = spread([3.0])
    assert (seen.count, seen.median, seen.p25, seen.p75, seen.mean) == (1, 3.0, 3.0, 3.0, 3.0)


def test_quartiles_interpolate() -> None:
    seen = spread([4.0, 1.0, 3.0, 2.0])
    assert (seen.p25, seen.median, seen.p75) == (1.75, 2.5, 3.25)
