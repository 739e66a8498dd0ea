"""What is expected of a block is what became of those that were like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.policy.returns import FIRST_RETURNS, LATE_S, PLACES_MAX, Returns
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.keys import KeyChain, root_key


def prompt(name: int, blocks: int) -> list[BlockKey]:
    return KeyChain(root_key(NamespaceId(bytes(32))), 2).update([name] * 2 * blocks)


def expected(returns: Returns, block: BlockKey, parent: BlockKey | None) -> float:
    return returns.expected(returns.class_of(block, parent))


class Traffic:
    """Documents that nobody asks for again, and conversations that go on after a while."""

    def __init__(self) -> None:
        self.now = 0.0
        self.returns = Returns(lambda: self.now)
        self.names = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.names += 2
            self.now += 10 * LATE_S
            self.returns.asked(prompt(self.names, 64))
            for blocks in (4, 6, 8):
                self.now += 2 * LATE_S
                self.returns.asked(prompt(self.names + 1, blocks))

    def expected(self, blocks: list[BlockKey], at: int) -> float:
        self.returns.asked(blocks)
        return expected(self.returns, blocks[at], blocks[at - 1] if at else None)


def test_what_is_like_what_came_back_is_expected_to_and_the_rest_is_not() -> None:
    traffic = Traffic()
    traffic.run(200)
    assert traffic.expected(prompt(9001, 64), 40) < 0.1
    assert traffic.expected(prompt(9002, 4), 2) > 0.6
    assert traffic.expected(prompt(9002, 6), 5) > 0.3, "the next turn, of which half are the last"


def test_of_what_was_never_asked_for_its_parent_tells_or_all() -> None:
    traffic = Traffic()
    assert expected(traffic.returns, prompt(9001, 1)[0], None) == pytest.approx(FIRST_RETURNS)
    traffic.run(200)
    *blocks, answer = prompt(9002, 5)
    traffic.returns.asked(blocks)
    assert expected(traffic.returns, answer, blocks[-1]) > 0.6
    assert 0.1 < expected(traffic.returns, prompt(9003, 1)[0], None) < 0.6


def test_uses_soon_after_each_other_are_the_arenas() -> None:
    traffic = Traffic()
    for name in range(100):
        for _ in range(50):
            traffic.now += LATE_S / 2
            traffic.returns.asked(prompt(name, 4))
    assert traffic.expected(prompt(9001, 4), 2) < 0.1


def test_what_was_learned_goes_on_in_another_life_and_what_is_broken_is_ignored() -> None:
    traffic = Traffic()
    traffic.run(200)
    saved = traffic.returns.save()
    assert len(saved) <= 40960
    traffic.returns = Returns(lambda: traffic.now)
    for broken in (saved[:-1], b"\xff" * len(saved)):
        traffic.returns.load(broken)
        assert traffic.returns.save() == b""
    traffic.returns.load(saved)
    assert traffic.expected(prompt(9001, 64), 40) < 0.1
    assert traffic.expected(prompt(9002, 4), 2) > 0.6


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.binary(max_size=40).map(BlockKey), st.integers(0, 30)),
        max_size=50,
    )
)
def test_any_keys_at_any_time_are_expected_to_return_at_least_never(
    asks: list[tuple[float, BlockKey, int]],
) -> None:
    now = 0.0
    returns = Returns(lambda: now)
    for pause_s, block, blocks in asks:
        now += pause_s
        returns.asked([block, *prompt(0, blocks)])
        assert expected(returns, block, None) >= 0.0


def test_its_memory_is_bounded() -> None:
    returns = Returns(lambda: 0.0)
    for name in range(20):
        keys = [BlockKey(bytes(24) + (name * PLACES_MAX + i).to_bytes(8)) for i in range(1 << 15)]
        returns.asked(keys)
    assert len(returns._words) <= PLACES_MAX
