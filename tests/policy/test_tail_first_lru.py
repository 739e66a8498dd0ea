"""Tail-first LRU keeps the policy contract, and orders prefixes by their last use."""

from __future__ import annotations

from kvstore.policy import TailFirstLru
from kvstore.testing.policy import PolicyContract, prefix


class TestTailFirstLru(PolicyContract):
    def make(self) -> TailFirstLru:
        return TailFirstLru()

    def test_the_prefix_used_longest_ago_leaves_first_tail_first(self) -> None:
        policy = self.filled(prefix(0, 3), prefix(100, 3))
        policy.touch(prefix(0, 3))
        assert list(policy.victims()) == [*prefix(100, 3)[::-1], *prefix(0, 3)[::-1]]

    def test_a_partial_touch_leaves_the_untouched_tail_behind(self) -> None:
        policy = self.filled(prefix(0, 4), prefix(100, 2))
        policy.touch(prefix(0, 2))
        order = list(policy.victims())
        assert order[:2] == prefix(2, 2)[::-1]
        assert order[-2:] == prefix(0, 2)[::-1]
