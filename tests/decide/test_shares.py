"""Shares of a tier: guarantees hold, what is free is lent, and the sum never exceeds the tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.shares import Claim, by_weight, caps_for, raised

GIB = 1 << 30


def claim(guaranteed: int, used: int, *, cap: int = 0, headroom: int = 0, weight: float = 1.0,
          most: int = 100) -> Claim:  # fmt: skip
    return Claim(guaranteed, most, weight, used, headroom, cap)


def test_who_is_alone_borrows_all_that_is_free() -> None:
    busy, idle = claim(10, 90, headroom=10), claim(40, 0, headroom=1)
    assert caps_for(100, [busy, idle]) == [99, 1]


def test_who_is_within_its_guarantee_gets_it_back() -> None:
    borrower, owner = claim(10, 99, cap=99, headroom=5), claim(40, 35, cap=1, headroom=5)
    assert caps_for(100, [borrower, owner]) == [60, 40]


def test_beyond_guarantees_the_weights_count() -> None:
    light, heavy = claim(10, 80, headroom=20), claim(10, 80, headroom=20, weight=3)
    assert caps_for(100, [light, heavy]) == [30, 70]


def test_nobody_gives_what_nobody_needs() -> None:
    holder, other = claim(10, 20, cap=70, headroom=1), claim(10, 5, cap=20, headroom=1)
    assert caps_for(100, [holder, other]) == [70, 20]


def test_nobody_has_more_than_its_maximum() -> None:
    assert caps_for(100, [claim(10, 90, headroom=10, most=50)]) == [50]


def test_a_cap_is_raised_only_by_what_was_given_back() -> None:
    assert raised(100, held=[80, 10], caps=[60, 10], to=[60, 40]) == [60, 20]
    assert raised(100, held=[60, 10], caps=[60, 10], to=[60, 40]) == [60, 40]


amounts = st.integers(0, 1000)
claims = st.lists(
    st.builds(
        lambda guaranteed, more, weight, used, headroom, cap: Claim(
            guaranteed, guaranteed + more, weight, used, headroom, cap
        ),
        st.integers(1, 100), amounts, st.floats(0.1, 10), amounts, amounts, amounts,
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@given(claims, amounts)
def test_guarantees_hold_and_the_sum_fits(each: list[Claim], more: int) -> None:
    capacity = sum(one.guaranteed for one in each) + more
    caps = caps_for(capacity, each)
    assert sum(caps) <= capacity
    for one, cap in zip(each, caps, strict=True):
        assert min(one.need, one.guaranteed) <= cap <= max(one.most, 0)


@given(claims, amounts)
def test_room_is_left_only_if_nobody_wants_it(each: list[Claim], more: int) -> None:
    capacity = sum(one.guaranteed for one in each) + more
    caps = caps_for(capacity, each)
    unmet = [one for one, cap in zip(each, caps, strict=True) if cap < one.need]
    if unmet:
        assert capacity - sum(caps) <= 2 * len(each)  # of rounding


@given(st.integers(0, 1000), st.lists(st.tuples(amounts, st.floats(0.1, 10)), max_size=8))
def test_parts_by_weight_are_fair(room: int, asked: list[tuple[int, float]]) -> None:
    wanted, weights = [a for a, _ in asked], [w for _, w in asked]
    parts = by_weight(room, wanted, weights)
    assert sum(parts) <= room
    short = [(p, w) for p, a, w in zip(parts, wanted, weights, strict=True) if p < a]
    for part, weight in short:
        for other, heavy in zip(parts, weights, strict=True):
            assert (other - len(asked) - 1) / heavy <= (part + len(asked) + 1) / weight


def test_rounding_gives_nobody_more_than_there_is() -> None:
    """What is left of the sum of weights is a little less than the last one."""
    room = 43_946_105_372_682
    weights = [1.0, 900.0, 123.41639865964035, 123.41639865964035]
    assert sum(by_weight(room, [room, 8, 1, 1], weights)) == room


@given(st.lists(st.tuples(amounts, amounts, amounts), min_size=1, max_size=8), amounts)
def test_what_is_held_never_exceeds_the_tier(each: list[tuple[int, int, int]], more: int) -> None:
    held, caps, to = ([one[at] for one in each] for at in range(3))
    to = [max(cap, target) for cap, target in zip(caps, to, strict=True)]
    capacity = sum(max(cap, has) for cap, has in zip(caps, held, strict=True)) + more
    after = raised(capacity, held, caps, to)
    assert all(cap <= new <= max(cap, t) for cap, new, t in zip(caps, after, to, strict=True))
    assert sum(max(new, has) for new, has in zip(after, held, strict=True)) <= capacity
