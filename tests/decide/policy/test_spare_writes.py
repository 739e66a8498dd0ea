"""What one tenant leaves of the writes of a day others may write, and never more than all may."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.policy import SpareWrites, WriteBudget
from kvstore.decide.policy.write_budget import BURST_S, DAY_S, TICK_S
from kvstore.testing.policy import key
from tests.decide.policy.test_write_budget import Told

SHARE = 1000  # bytes a second
NAMES = count()


@dataclass
class Tenant:
    """share, most: bytes a second."""

    share: int = SHARE
    most: int = 1 << 20
    weight: float = 1.0


class Flash:
    """Several budgets that lend, their clock, and what each let pass."""

    def __init__(self, **tenants: Tenant) -> None:
        self.now = 0.0
        self.spare = SpareWrites(lambda: self.now)
        self.returns = Told(lambda: self.now)
        self.budgets: dict[str, WriteBudget] = {}
        self.written = dict.fromkeys(tenants, 0.0)
        for name, each in tenants.items():
            per_day = each.share * int(DAY_S)
            self.budgets[name] = WriteBudget(per_day, lambda: self.now, self.returns)
            self.spare.set(name, self.budgets[name], each.most * int(DAY_S), each.weight)

    def offer(self, name: str, nbytes: int, returns: float = 0.5, *, begun: bool = True) -> bool:
        self.returns.next = returns
        block = key(next(NAMES))
        admitted = self.budgets[name].admits(block, nbytes, parent=None, begun=begun)
        self.written[name] += nbytes if admitted else 0
        return admitted

    def hours(self, number: float, **offers: int) -> dict[str, float]:
        """Let each offer so many bytes a second; return how many a second were written."""
        before = dict(self.written)
        seconds = int(3600 * number)
        for _ in range(seconds // 2):
            self.now += 2.0
            for name, per_s in offers.items():
                self.offer(name, 2 * per_s)
        return {name: (self.written[name] - before[name]) / seconds for name in offers}


def test_what_one_does_not_use_the_other_may_write() -> None:
    flash = Flash(idle=Tenant(), busy=Tenant())
    flash.hours(2, busy=5 * SHARE)  # the idle one saves up first
    assert flash.hours(3, busy=5 * SHARE)["busy"] == pytest.approx(2 * SHARE, rel=0.02)


def test_who_wakes_has_its_own_share_at_once_and_what_it_has_saved_up() -> None:
    flash = Flash(wakes=Tenant(), busy=Tenant())
    flash.hours(3, busy=5 * SHARE)
    assert flash.offer("wakes", int(1.9 * SHARE * BURST_S)), "saved up, and half an hour on credit"
    rates = flash.hours(3, wakes=5 * SHARE, busy=5 * SHARE)
    assert rates == pytest.approx({"wakes": SHARE, "busy": SHARE}, rel=0.1)


def test_who_stays_within_its_share_writes_all_whatever_others_want() -> None:
    flash = Flash(modest=Tenant(), greedy=Tenant(weight=100))
    for _ in range(3):
        rates = flash.hours(1, modest=SHARE, greedy=50 * SHARE)
        assert rates["modest"] == SHARE
    assert rates["greedy"] == pytest.approx(SHARE, rel=0.02)


def test_nobody_borrows_beyond_its_own_maximum() -> None:
    flash = Flash(idle=Tenant(), busy=Tenant(most=SHARE * 3 // 2))
    flash.hours(2, busy=5 * SHARE)
    assert flash.hours(3, busy=5 * SHARE)["busy"] == pytest.approx(1.5 * SHARE, rel=0.02)


def test_what_is_spare_is_divided_by_weight() -> None:
    flash = Flash(idle=Tenant(), light=Tenant(), heavy=Tenant(weight=3))
    flash.hours(3, light=9 * SHARE, heavy=9 * SHARE)
    rates = flash.hours(3, light=9 * SHARE, heavy=9 * SHARE)
    expected = {"light": 1.25 * SHARE, "heavy": 1.75 * SHARE}
    assert rates == pytest.approx(expected, rel=0.02)


def test_with_room_for_all_the_less_likely_is_written_too() -> None:
    """A share that is small beside what is borrowed: it does not say what has room."""
    flash = Flash(idle=Tenant(share=9 * SHARE), busy=Tenant())
    written = offered = 0
    for second in range(3 * 3600):
        flash.now += 1.0
        flash.offer("busy", 4 * SHARE, 0.9)
        admitted = flash.offer("busy", 4 * SHARE, 0.1)
        if second > 5400:
            written, offered = written + admitted, offered + 1
    assert written > 0.99 * offered


def test_who_has_left_neither_lends_nor_borrows() -> None:
    flash = Flash(idle=Tenant(), busy=Tenant())
    flash.hours(2, busy=5 * SHARE)
    flash.spare.remove("idle")
    flash.spare.remove("nobody")
    flash.hours(2, busy=5 * SHARE)
    assert flash.hours(2, busy=5 * SHARE)["busy"] == pytest.approx(SHARE, rel=0.02)
    flash.spare.remove("busy")
    assert flash.hours(2, busy=5 * SHARE)["busy"] == pytest.approx(SHARE, rel=0.02)


OFFERS = st.tuples(
    st.sampled_from("abc"), st.floats(0, 7200), st.integers(1, 10 * SHARE * int(BURST_S))
)
TENANTS = st.builds(Tenant, st.integers(1, 3000), st.integers(1, 9000), st.floats(0.1, 10))


@given(st.tuples(TENANTS, TENANTS, TENANTS), st.lists(OFFERS, min_size=1, max_size=100))
def test_all_together_never_write_more_than_the_whole_and_two_bursts(
    tenants: tuple[Tenant, Tenant, Tenant], offers: list[tuple[str, float, int]]
) -> None:
    flash = Flash(**dict(zip("abc", tenants, strict=True)))
    whole = sum(each.share for each in tenants)
    largest = dict.fromkeys("abc", 0)
    before: list[tuple[float, float]] = []  # when, and what was written until then
    for name, pause_s, nbytes in offers:
        flash.now += pause_s
        before.append((flash.now, sum(flash.written.values())))
        largest[name] = max(largest[name], nbytes)
        flash.offer(name, nbytes)
        written = sum(flash.written.values())
        for at, until_then in before:
            earned = whole * (flash.now - at + TICK_S + 2 * BURST_S)
            assert written - until_then <= earned + sum(largest.values()) + 1.0


@given(st.lists(OFFERS, min_size=1, max_size=60))
def test_nobody_is_refused_what_its_own_share_would_have_let_pass(
    offers: list[tuple[str, float, int]],
) -> None:
    """Until it borrows, a tenant has in any company what it has alone."""
    together, alone = Flash(a=Tenant(), b=Tenant(), c=Tenant()), Flash(a=Tenant())
    for name, pause_s, nbytes in offers:
        together.now += pause_s
        alone.now += pause_s
        admitted = together.offer(name, nbytes)
        if name == "a":
            if not alone.offer("a", nbytes):
                return  # from here on it may have borrowed
            assert admitted
