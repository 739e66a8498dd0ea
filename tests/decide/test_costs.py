"""What engines say that a block costs counts, and counts only so far."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.costs import LEVEL_MAX, TELLERS_MAX, Costs, block_nbytes
from kvstore.model.block import Group, Namespace


def namespace(name: str, nbytes: int = 1 << 20) -> Namespace:
    return Namespace(16, (Group("all", nbytes),), (("model", name),))


LARGE, SMALL = namespace("large"), namespace("small")


def test_of_two_models_the_one_that_costs_more_a_byte_is_worth_more() -> None:
    costs = Costs()
    for _ in range(100):
        costs.told(LARGE, 0.2, 10)
        costs.told(SMALL, 0.01, 30)
    assert costs.level(LARGE.id) - costs.level(SMALL.id) == LEVEL_MAX


def test_bytes_count_not_blocks() -> None:
    costs = Costs()
    heavy = namespace("heavy", 20 << 20)
    for _ in range(100):
        costs.told(heavy, 0.2, 10)
        costs.told(SMALL, 0.01, 10)
    assert costs.levels == {heavy.id: 0, SMALL.id: 0}
    two = Namespace(16, (Group("a", 100, shards=2), Group("b", 50)), ())
    assert block_nbytes(two) == 250


def test_of_a_lossy_block_the_bytes_of_its_base_count() -> None:
    """Two models of equal size and pace: the one whose blocks are a quarter as large saves four
    times as much a byte."""
    costs = Costs()
    groups = (
        Group("all", 1 << 20, varies=True),
        Group("all.fine", 1 << 19, refines=0, base_nbytes=1 << 18),
    )
    lossy = Namespace(16, groups, (("model", "lossy"),), fidelity="ep")
    for _ in range(100):
        costs.told(SMALL, 0.01, 30)
        costs.told(lossy, 0.01, 10)
    assert costs.level(lossy.id) - costs.level(SMALL.id) == 2
    assert costs.s_per_block(lossy) == pytest.approx(0.01)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_who_lies_gets_no_more_than_the_bound_and_changes_nobody_elses_level(
    claims: list[float],
) -> None:
    costs = Costs()
    for _ in range(64):
        costs.told(SMALL, 0.01, 10)
        costs.told(LARGE, 0.01, 10)
    liar = namespace("liar")
    for claim in [*claims, 1e300, 5e-324, -1.0, 0.0, math.nan, math.inf]:
        costs.told(liar, claim, 1)
        costs.told(SMALL, 0.01, 10)
        assert abs(costs.level(liar.id)) <= LEVEL_MAX
        assert costs.level(SMALL.id) == costs.level(LARGE.id) == 0


def test_a_cost_between_two_levels_does_not_flap() -> None:
    costs = Costs()
    levels = set()
    for n in range(400):
        costs.told(SMALL, 0.01, 10)
        costs.told(LARGE, 0.01 * 2 ** (1.5 + 0.2 * math.sin(n / 30)), 3)
        if n > 40:
            levels.add(costs.level(LARGE.id))
    assert len(levels) == 1


def test_its_memory_is_bounded() -> None:
    costs = Costs()
    for n in range(2 * TELLERS_MAX):
        costs.told(namespace(str(n)), 0.01, 1)
    assert len(costs.levels) == TELLERS_MAX
    assert costs.level(namespace("0").id) == 0


@pytest.mark.parametrize("claim", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_ignored(claim: float) -> None:
    costs = Costs()
    costs.told(SMALL, claim, 1)
    assert not costs.levels


def test_what_was_told_is_known_in_the_next_life() -> None:
    costs = Costs()
    for _ in range(50):
        costs.told(LARGE, 0.2, 10)
        costs.told(SMALL, 0.01, 30)
    again = Costs()
    assert again.s_per_block(LARGE) == 0.0
    assert again.load(costs.save() + b"rest") == b"rest"
    assert again.s_per_block(LARGE) == pytest.approx(0.2)
    assert again.s_per_block(SMALL) == pytest.approx(0.01)
    assert again.levels == costs.levels
    assert Costs().save() == b""
    assert Costs().load(b"what others saved") == b"what others saved"


def test_what_was_told_in_this_life_counts_for_more_than_what_was_saved() -> None:
    costs, again = Costs(), Costs()
    costs.told(SMALL, 0.01, 10)
    again.told(SMALL, 0.5, 10)
    again.load(costs.save())
    assert again.s_per_block(SMALL) == pytest.approx(0.5)


@given(st.data())
def test_what_cannot_have_been_saved_is_ignored(data: st.DataObject) -> None:
    costs = Costs()
    for number in range(data.draw(st.integers(0, 4))):
        costs.told(namespace(str(number)), 0.01, 10)
    saved = bytearray(costs.save() or b"kvcosts\1\3\0\0\0")
    for _ in range(data.draw(st.integers(0, 8))):
        saved[data.draw(st.integers(0, len(saved) - 1))] = data.draw(st.integers(0, 255))
    again = Costs()
    again.load(bytes(saved[: data.draw(st.integers(0, len(saved)))]))
    again.told(SMALL, 0.01, 10)
    assert all(abs(level) <= LEVEL_MAX for level in again.levels.values())
    assert math.isfinite(again.s_per_block(SMALL))


@pytest.mark.parametrize("claim", [5e-324, 1e-12, 1e300, 1.7e308])
def test_one_absurd_claim_hardly_moves_what_is_known(claim: float) -> None:
    costs = Costs()
    for _ in range(4):
        costs.told(SMALL, 0.05, 10)
    costs.told(SMALL, claim, 10)
    assert 0.05 / 1.4 < costs.s_per_block(SMALL) < 0.05 * 1.4


@pytest.mark.parametrize("claim", [5e-324, 1.7e308])
def test_who_begins_with_an_absurd_claim_heals(claim: float) -> None:
    costs = Costs()
    costs.told(SMALL, claim, 10)
    assert 0 < costs.s_per_block(SMALL) <= 1e4
    for _ in range(100):
        costs.told(SMALL, 0.05, 10)
    assert costs.s_per_block(SMALL) == pytest.approx(0.05, rel=0.01)


def test_newcomers_take_no_weight_from_the_others() -> None:
    costs = Costs()
    for _ in range(64):
        costs.told(SMALL, 0.01, 10_000)
    before = costs._tellers[SMALL.id].asked
    for number in range(60):
        costs.told(namespace(f"new {number}"), 0.04, 1)
    assert costs._tellers[SMALL.id].asked >= before * 0.8
    assert costs.level(namespace("new 59").id) == 2  # its level is there at once all the same
