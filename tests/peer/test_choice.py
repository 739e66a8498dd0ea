"""Who is asked for a prefix, and who gives it."""

from __future__ import annotations

import math

import pytest

from kvstore.peer.choice import Offer, best_first, choose

STEP = 16


def order(**offers: Offer) -> list[str]:
    return best_first(list(offers.items()), step=STEP)


def firsts(**offers: Offer) -> set[str]:
    return {order(**offers)[0] for _ in range(100)}


def test_the_longest_are_asked_first_and_near_ones_of_those_alike() -> None:
    found = [("far", 9), ("near", 8), ("shorter", 6), ("short", 3)]
    for _ in range(10):
        assert choose(found, is_near=lambda p: p != "far") == ["near", "far", "shorter"]
    assert {choose(found)[0] for _ in range(50)} == {"near", "far"}


def test_a_head_more_counts_more_than_zone_and_pace() -> None:
    assert order(short=Offer(24), longest=Offer(40, is_near=False, expected_s=9.0)) == [
        "longest",
        "short",
    ]


def test_of_those_within_a_head_near_ones_come_first() -> None:
    offers = {"far": Offer(40, is_near=False, expected_s=0.001), "near": Offer(25, expected_s=1.0)}
    assert firsts(**offers) == {"near"}


def test_of_those_as_near_the_faster_one_comes_first() -> None:
    assert firsts(slow=Offer(40, expected_s=1.0), fast=Offer(30, expected_s=0.1)) == {"fast"}
    assert firsts(slow=Offer(40, expected_s=1.0), unknown=Offer(40)) == {"unknown"}
    assert firsts(behind=Offer(40, expected_s=math.inf), slow=Offer(40, expected_s=60.0)) == {
        "slow"
    }


@pytest.mark.parametrize("expected_s", [0.0, 0.3])
def test_not_everybody_reads_from_the_same_one(expected_s: float) -> None:
    one, other = Offer(40, expected_s=expected_s), Offer(38, expected_s=1.05 * expected_s)
    assert firsts(one=one, other=other) == {"one", "other"}
