"""The contract every eviction policy keeps. Subclass it and say how to make one."""

from __future__ import annotations

from kvstore.block import BlockKey
from kvstore.policy import Policy


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(32, "big"))


def prefix(start: int, blocks: int) -> list[BlockKey]:
    return [key(start + i) for i in range(blocks)]


class PolicyContract:
    """Subclass and override `make`."""

    def make(self) -> Policy:
        raise NotImplementedError("return a new, empty policy")

    def filled(self, *prefixes: list[BlockKey]) -> Policy:
        policy = self.make()
        for blocks in prefixes:
            for i, block in enumerate(blocks):
                policy.insert(block, blocks[i - 1] if i else None)
        return policy

    def test_victims_are_exactly_what_was_inserted_and_not_removed(self) -> None:
        policy = self.filled(prefix(0, 5), prefix(100, 5))
        policy.remove(key(2))
        policy.remove(key(77))
        assert sorted(policy.victims()) == sorted([*prefix(0, 2), *prefix(3, 2), *prefix(100, 5)])

    def test_a_child_leaves_before_its_parent(self) -> None:
        policy = self.filled(prefix(0, 6))
        assert list(policy.victims()) == prefix(0, 6)[::-1]

    def test_a_child_written_late_still_leaves_before_its_parent(self) -> None:
        policy = self.filled(prefix(0, 3), prefix(100, 3))
        policy.insert(key(3), key(2))
        order = list(policy.victims())
        assert order.index(key(3)) < order.index(key(2))

    def test_inserting_twice_changes_nothing(self) -> None:
        policy = self.filled(prefix(0, 3))
        policy.insert(key(1), key(0))
        assert sorted(policy.victims()) == prefix(0, 3)

    def test_touching_unknown_blocks_admits_nothing(self) -> None:
        policy = self.filled(prefix(0, 2))
        policy.touch(prefix(0, 4))
        assert sorted(policy.victims()) == prefix(0, 2)

    def test_removing_any_blocks_while_walking_yields_none_of_them(self) -> None:
        policy = self.filled(prefix(0, 10))
        seen = []
        for victim in policy.victims():
            seen.append(victim)
            for other in (victim, *prefix(3, 4)):
                policy.remove(other)
        assert len(seen) == len(set(seen))
        assert not set(seen[1:]) & set(prefix(3, 4))
        assert not list(policy.victims())
