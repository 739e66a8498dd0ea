"""The contract every eviction policy keeps. Subclass it and say how to make one."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.decide.policy import Policy
from kvstore.model.block import BlockKey


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(32, "big"))


def prefix(start: int, blocks: int) -> list[BlockKey]:
    return [key(start + i) for i in range(blocks)]


def drained(policy: Policy) -> list[BlockKey]:
    """Evict everything; return the blocks in the order in which they left."""
    gone = []
    for victim in policy.victims():
        policy.remove(victim)
        gone.append(victim)
    return gone


class PolicyContract:
    """Subclass and override `make`. `time_s` is the policy's clock."""

    time_s = 0.0

    def make(self, now: Callable[[], float]) -> Policy:
        raise NotImplementedError("return a new, empty policy")

    def filled(self, *prefixes: list[BlockKey]) -> Policy:
        """Return a policy that was asked for prefixes, a second apart, and has them now."""
        policy = self.make(lambda: self.time_s)
        for blocks in prefixes:
            self.time_s += 1
            policy.touch(blocks)
            for i, block in enumerate(blocks):
                policy.insert(block, blocks[i - 1] if i else None)
        return policy

    def test_what_leaves_is_exactly_what_was_inserted_and_not_removed(self) -> None:
        policy = self.filled(prefix(0, 5), prefix(100, 5))
        policy.remove(key(2))
        policy.remove(key(77))
        assert sorted(drained(policy)) == sorted([*prefix(0, 2), *prefix(3, 2), *prefix(100, 5)])
        assert not drained(policy)

    def test_a_child_leaves_before_its_parent(self) -> None:
        policy = self.filled(prefix(0, 6))
        assert drained(policy) == prefix(0, 6)[::-1]

    def test_a_child_written_late_still_leaves_before_its_parent(self) -> None:
        policy = self.filled(prefix(0, 3), prefix(100, 3))
        policy.insert(key(3), key(2))
        order = drained(policy)
        assert order.index(key(3)) < order.index(key(2))

    def test_a_parent_that_comes_back_leaves_after_its_children(self) -> None:
        policy = self.filled(prefix(0, 4))
        policy.remove(key(1))
        policy.insert(key(1), key(0))
        assert drained(policy) == prefix(0, 4)[::-1]

    def test_a_block_that_somebody_holds_keeps_all_before_it(self) -> None:
        policy = self.filled(prefix(0, 6), prefix(100, 2))
        held, gone = key(4), []
        for victim in policy.victims():
            if victim != held:
                policy.remove(victim)
                gone.append(victim)
        assert sorted(gone) == sorted([key(5), *prefix(100, 2)])
        assert drained(policy) == prefix(0, 5)[::-1]

    def test_inserting_twice_changes_nothing(self) -> None:
        policy = self.filled(prefix(0, 3))
        policy.insert(key(1), key(0))
        assert drained(policy) == prefix(0, 3)[::-1]

    def test_what_an_earlier_life_left_is_there_too(self) -> None:
        policy = self.filled(prefix(100, 3))
        for i, block in enumerate(prefix(0, 3)):
            policy.adopt(block, key(i - 1) if i else None)
        assert sorted(drained(policy)) == sorted([*prefix(0, 3), *prefix(100, 3)])

    def test_touching_unknown_blocks_admits_nothing(self) -> None:
        policy = self.filled(prefix(0, 2))
        policy.touch(prefix(0, 4))
        policy.end(prefix(0, 4))
        assert drained(policy) == prefix(0, 2)[::-1]

    def test_what_is_held_is_not_yielded_until_it_is_let_go(self) -> None:
        policy = self.filled(prefix(0, 6), prefix(100, 2))
        held = prefix(1, 3)
        policy.hold(held)
        policy.hold(held)
        policy.touch(prefix(0, 6))
        assert sorted(drained(policy)) == sorted([*prefix(4, 2), *prefix(100, 2)])
        policy.remove(key(2))
        policy.insert(key(2), key(1))
        policy.let_go(held)
        assert not drained(policy)
        policy.let_go(held)
        assert drained(policy) == prefix(0, 4)[::-1]

    def test_holding_what_is_not_there_admits_nothing_and_holds_it_when_it_comes(self) -> None:
        policy = self.filled(prefix(0, 2))
        policy.hold(prefix(0, 4))
        assert not drained(policy)
        policy.insert(key(2), key(1))
        policy.insert(key(3), key(2))
        assert not drained(policy)
        policy.let_go(prefix(0, 4))
        assert drained(policy) == prefix(0, 4)[::-1]

    def test_expecting_blocks_admits_nothing_and_keeps_nothing_for_ever(self) -> None:
        policy = self.filled(prefix(0, 3), prefix(100, 3))
        policy.expect(prefix(0, 6), self.time_s + 60)
        assert sorted(drained(policy)) == sorted([*prefix(0, 3), *prefix(100, 3)])

    def test_a_parent_that_is_not_expected_does_not_pass_for_its_child_that_was(self) -> None:
        policy = self.filled(prefix(0, 2))
        policy.end(prefix(0, 2))
        policy.expect(prefix(0, 2), self.time_s + 60)
        policy.end(prefix(0, 1))
        policy.remove(key(1))
        assert drained(policy) == prefix(0, 1)

    def test_removing_any_blocks_while_walking_yields_none_of_them(self) -> None:
        policy = self.filled(prefix(0, 10), prefix(100, 3))
        seen = []
        for victim in policy.victims():
            seen.append(victim)
            for other in (victim, *prefix(3, 4)):
                policy.remove(other)
        assert len(seen) == len(set(seen))
        assert not set(seen[1:]) & set(prefix(3, 4))
        assert not list(policy.victims())

    def test_made_up_keys_in_a_circle_leave_as_well(self) -> None:
        policy = self.make(lambda: self.time_s)
        for block, parent in ((0, 2), (1, 0), (2, 1), (3, 3)):
            policy.insert(key(block), key(parent))
        assert sorted(drained(policy)) == prefix(0, 4)
