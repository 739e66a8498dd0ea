"""Flash wears: only so much is written a day, and of that what is most likely to be used again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.policy import WriteBudget
from kvstore.decide.policy.returns import Returns
from kvstore.decide.policy.write_budget import BURST_S, DAY_S, MEMORY_S
from kvstore.model.block import BlockKey
from kvstore.testing.policy import key

PER_S = 10
PER_DAY = PER_S * int(DAY_S)
BURST = PER_S * BURST_S
NAMES = count()


class Told(Returns):
    """Expects what it is told."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.next = 0.0

    def class_of(self, key: BlockKey, parent: BlockKey | None) -> int:
        return round(1000 * self.next)

    def expected(self, number: int) -> float:
        return number / 1000


class Flash:
    """A budget, its clock, what it expects of the next block, and what it let pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.returns = Told(lambda: self.now)
        self.budget = WriteBudget(PER_DAY, lambda: self.now, self.returns)
        self.written = 0.0

    def offer(self, nbytes: int, returns: float, *, begun: bool = True, half: bool = False) -> bool:
        """Offer a block that nothing was offered with."""
        return self.offer_block(key(next(NAMES)), None, nbytes, returns, begun=begun, half=half)

    def offer_block(
        self,
        block: BlockKey,
        parent: BlockKey | None,
        nbytes: int,
        returns: float,
        *,
        begun: bool = True,
        half: bool = False,
    ) -> bool:
        self.returns.next = returns
        admitted = self.budget.admits(block, nbytes, parent=parent, begun=begun, half=half)
        self.written += nbytes if admitted else 0
        return admitted

    def restart(self) -> None:
        saved = self.budget.save()
        self.budget = WriteBudget(PER_DAY, lambda: self.now, self.returns)
        ours, others = WriteBudget.split(saved + b"of others")
        assert others == b"of others"
        self.budget.load(ours)


OFFERS = st.tuples(
    st.floats(0, 3600), st.integers(1, 5000), st.floats(0, 1), st.booleans(), st.booleans()
)


@given(st.lists(OFFERS, min_size=1, max_size=200), st.sets(st.integers(0, 199)))
def test_no_span_of_time_sees_more_than_its_share_two_bursts_and_a_record(
    offers: list[tuple[float, int, float, bool, bool]], restarts: set[int]
) -> None:
    flash = Flash()
    largest = 0
    before: list[tuple[float, float]] = []  # when, and what was written until then
    for number, (pause_s, nbytes, returns, begun, half) in enumerate(offers):
        flash.now += pause_s
        if number in restarts:
            flash.restart()
        before.append((flash.now, flash.written))
        largest = max(largest, nbytes)
        flash.offer(nbytes, returns, begun=begun, half=half)
        for at, written in before:
            span_s = flash.now - at
            assert flash.written - written <= PER_S * span_s + 2 * BURST + largest + 1e-6


def hours(flash: Flash, number: float, offers: dict[float, int]) -> dict[float, float]:
    """Offer so many bytes of each kind every second; return the shares that were written."""
    seconds = int(3600 * number)
    admitted = dict.fromkeys(offers, 0)
    for _ in range(seconds):
        flash.now += 1.0
        for returns, nbytes in offers.items():
            admitted[returns] += flash.offer(nbytes, returns)
    return {returns: n / seconds for returns, n in admitted.items()}


def test_while_the_budget_suffices_everything_is_written() -> None:
    flash = Flash()
    assert hours(flash, 3, {0.01: PER_S // 2, 0.9: PER_S // 2}) == {0.01: 1.0, 0.9: 1.0}


@pytest.mark.parametrize("offered", [{0.5: 100}, {0.01: 60, 0.02: 40}, {0.9: 2, 0.1: 98}])
def test_a_budget_that_does_not_suffice_is_spent(offered: dict[float, int]) -> None:
    flash = Flash()
    hours(flash, 2, offered)
    before, began = flash.written, flash.now
    hours(flash, 3, offered)
    assert flash.written - before == pytest.approx(PER_S * (flash.now - began), rel=0.05)


def test_it_goes_to_what_is_most_likely_to_be_used_again() -> None:
    flash = Flash()
    offered = {0.05: 20, 0.3: 10, 0.6: 4}  # bytes a second, of which ten may be written
    hours(flash, 2, offered)
    written = hours(flash, 3, offered)
    assert written[0.6] == 1.0
    assert written[0.3] == pytest.approx(0.6, abs=0.05)
    assert written[0.05] == 0.0


def test_it_follows_when_other_things_are_offered() -> None:
    flash = Flash()
    hours(flash, 2, {0.6: 20, 0.3: 10})
    assert hours(flash, 0.1, {0.6: 20, 0.3: 10})[0.3] == 0.0
    hours(flash, 4 * MEMORY_S / 3600, {0.3: 5, 0.05: 10})
    assert hours(flash, 0.1, {0.3: 5, 0.05: 10})[0.3] == 1.0


def test_nothing_is_written_whose_start_is_not() -> None:
    flash = Flash()
    assert not flash.offer(1, 1.0, begun=False)
    assert flash.offer(1, 1.0)


def test_a_prompt_is_written_whole_but_for_what_is_less_likely() -> None:
    flash = Flash()
    hours(flash, 2, {0.3: 100})
    while not flash.offer_block(first := key(next(NAMES)), None, 1, 0.3):
        flash.now += 1.0
    parent = first
    for _ in range(100):
        block = key(next(NAMES))
        assert flash.offer_block(block, parent, 10, 0.3)
        assert flash.offer_block(block, parent, 10, 0.3), "another part of it"
        parent = block
    assert not flash.offer_block(key(next(NAMES)), parent, 10, 0.1)


def test_a_block_of_which_a_part_was_written_is_completed_on_credit() -> None:
    flash = Flash()
    hours(flash, 2, {0.9: 100})
    assert not flash.offer(1, 0.1)
    assert flash.offer(1, 0.1, half=True)


def test_it_goes_on_where_an_earlier_life_was_and_ignores_what_is_broken() -> None:
    flash = Flash()
    while flash.offer(100, 0.5):
        pass
    flash.now += 600
    flash.restart()
    assert flash.offer(10_000, 0.5)
    assert not flash.offer(5000, 0.5), "a restart is no new budget"
    saved = flash.budget.save()
    for broken in (b"", saved[:-1], b"x" + saved[1:], saved[:8] + b"\xff" * (len(saved) - 8)):
        fresh = Flash()
        fresh.budget.load(WriteBudget.split(broken)[0])
        assert fresh.offer(5000, 0.5)
