"""Tail-first LRU keeps the policy contract, and orders prefixes by their last use."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.decide.policy import TailFirstLru
from kvstore.testing.policy import PolicyContract, drained, key, prefix


class TestTailFirstLru(PolicyContract):
    def make(self, now: Callable[[], float]) -> TailFirstLru:
        return TailFirstLru()

    def test_the_prefix_used_longest_ago_leaves_first_tail_first(self) -> None:
        policy = self.filled(prefix(0, 3), prefix(100, 3))
        policy.touch(prefix(0, 3))
        assert drained(policy) == [*prefix(100, 3)[::-1], *prefix(0, 3)[::-1]]

    def test_a_partial_touch_leaves_the_untouched_tail_behind(self) -> None:
        policy = self.filled(prefix(0, 4), prefix(100, 2))
        policy.touch(prefix(0, 2))
        order = drained(policy)
        assert order[:2] == prefix(2, 2)[::-1]
        assert order[-2:] == prefix(0, 2)[::-1]

    def test_what_no_other_prefix_shares_is_alone(self) -> None:
        shared = prefix(0, 2)
        policy = self.filled([*shared, *prefix(100, 2)], [*shared, *prefix(200, 2)])
        assert sorted(policy.alone([*shared, *prefix(200, 3)])) == prefix(200, 2)

    def test_what_was_found_leaves_before_what_was_used_in_this_life(self) -> None:
        policy = self.filled(prefix(0, 2))
        policy.adopt(prefix(100, 1)[0], None)
        assert drained(policy)[0] == prefix(100, 1)[0]


def test_a_parent_found_after_its_children_leaves_with_them() -> None:
    policy = TailFirstLru()
    root, parent, child = key(1), key(2), key(3)
    policy.adopt(root, None)
    policy.adopt(child, parent)
    policy.adopt(parent, root)
    left = []
    for victim in policy.victims():
        policy.remove(victim)
        left.append(victim)
    assert left == [child, parent, root]
