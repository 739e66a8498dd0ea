"""Flash wears: only so much is written a day, whole prefixes before new ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy import WriteBudget
from kvstore.policy.write_budget import BURST_S, DAY_S

PER_DAY = 864_000  # ten bytes a second
BURST = int(10 * BURST_S)


def test_a_prefix_that_was_begun_is_finished_on_credit_and_no_new_one_begun() -> None:
    now = 0.0
    budget = WriteBudget(PER_DAY, lambda: now)
    assert budget.admits(BURST, continues=False)
    assert not budget.admits(1, continues=False)
    assert budget.admits(BURST, continues=True)
    assert not budget.admits(1, continues=True)
    now = BURST_S
    assert not budget.admits(1, continues=False)
    assert budget.admits(1, continues=True)
    now += 1
    assert budget.admits(1, continues=False)


@given(
    st.lists(
        st.tuples(st.floats(0, 3600), st.integers(1, 5000), st.booleans()), min_size=1, max_size=200
    )
)
def test_no_day_sees_more_than_its_budget_and_the_bursts(
    asks: list[tuple[float, int, bool]],
) -> None:
    now = written = largest = 0.0
    budget = WriteBudget(PER_DAY, lambda: now)
    for pause_s, nbytes, continues in asks:
        now += pause_s
        largest = max(largest, nbytes)
        written += nbytes if budget.admits(nbytes, continues=continues) else 0
        assert written <= PER_DAY * now / DAY_S + 2 * BURST + largest
