"""A policy that raises gives way to `lru`: nothing is lost but its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.planner.policies import Policies
from kvstore.decide.policy import Guarded, HazardDensity, TailFirstLru
from kvstore.decide.policy.late_lru import Links
from kvstore.decide.rows import FIRST_ROW
from kvstore.model.block import BlockKey
from kvstore.testing.policy import PolicyContract, key, prefix


class TestGuarded(PolicyContract):
    def make(self, now: Callable[[], float]) -> Guarded:
        return Guarded(HazardDensity, now)


class Breaks:
    """A policy whose calls raise from one of them on."""

    def __init__(self, calls: int) -> None:
        self._inner = TailFirstLru()
        self.left = calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError(name)
            return method(*args)

        return call

    def touch(self, prefix: list[BlockKey]) -> None:
        self.__getattr__("touch")(prefix)

    def victims(self) -> Iterator[BlockKey]:
        for victim in self._inner.victims():
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("victims")
            yield victim


class Tier:
    """A guarded policy, and the books that it is made anew from."""

    def __init__(self, calls: int) -> None:
        self.here: dict[BlockKey, BlockKey | None] = {}
        self.rows: list[BlockKey] = []
        self.failed: list[Exception] = []
        self.policy = Guarded(lambda now: Breaks(calls), lambda: 0.0, failed=self.failed.append)
        self.policy.stored = self

    @property
    def end(self) -> int:
        return FIRST_ROW + len(self.rows)

    def within(self, begin: int, end: int) -> Links:
        return self.among(self.rows[begin - FIRST_ROW : end - FIRST_ROW])

    def among(self, keys: Sequence[BlockKey]) -> Links:
        return [(each, self.here[each]) for each in keys if each in self.here]

    def put(self, blocks: list[BlockKey]) -> None:
        self.policy.touch(blocks, 2)
        for i, block in enumerate(blocks):
            if block not in self.rows:
                self.rows.append(block)
            self.here[block] = blocks[i - 1] if i else None
            self.policy.insert(block, self.here[block])

    def evict(self) -> list[BlockKey]:
        gone = []
        for victim in self.policy.victims():
            assert victim not in self.here.values()
            gone.append(victim)
            self.remove(victim)
        return gone

    def remove(self, block: BlockKey) -> None:
        self.here.pop(block, None)
        self.policy.remove(block)


@settings(deadline=None)
@given(st.integers(0, 60))
def test_whenever_a_policy_raises_what_is_there_leaves_and_what_is_held_stays(calls: int) -> None:
    tier = Tier(calls)
    tier.put(prefix(0, 5))
    tier.put(prefix(100, 4))
    tier.policy.hold(prefix(0, 2))
    tier.policy.hold(prefix(0, 2))
    tier.policy.let_go(prefix(0, 2))
    tier.remove(key(4))
    tier.policy.end(prefix(100, 4))
    tier.policy.expect(prefix(0, 3), 10.0)
    tier.put([*prefix(0, 3), key(50)])
    assert tier.policy.alone(prefix(100, 4)) == prefix(100, 4)
    assert tier.policy.is_leaf(key(103))
    assert tier.policy.save() == b""
    tier.policy.load(b"")
    assert sorted(tier.evict()) == sorted([key(2), key(3), key(50), *prefix(100, 4)])
    tier.policy.let_go(prefix(0, 2))
    assert tier.evict() == prefix(0, 2)[::-1]
    assert (tier.policy.error is not None) == bool(tier.failed)
    assert len(tier.failed) <= 1
    if calls < 20:
        assert isinstance(tier.policy.error, ZeroDivisionError)


def test_a_policy_that_takes_no_level_is_not_told_one() -> None:
    tier = Tier(1000)
    tier.put(prefix(0, 2))
    assert not tier.failed


def test_what_lru_itself_raises_is_not_hidden() -> None:
    tier = Tier(0)
    tier.put(prefix(0, 2))
    assert tier.failed
    tier.policy._policy = Breaks(0)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        tier.policy.remove(key(0))


class Mute(TailFirstLru):
    """Its order cannot be told, and it saves nothing that is bytes."""

    @property
    def choice(self) -> Any:
        raise ZeroDivisionError

    def save(self) -> Any:
        return None


def mute() -> Policies:
    return Policies(lambda now: Mute(), lambda now: TailFirstLru(), lambda: 0.0, has_file=True)


def test_a_policy_that_cannot_say_what_it_follows_gives_way() -> None:
    policies = mute()
    assert policies.choices == {"dram": None, "file": None}
    assert policies.failures == {"dram": 1, "file": 0}
    assert policies.save() == b""


def test_a_policy_that_saves_no_bytes_gives_way() -> None:
    policies = mute()
    assert policies.save() == b""
    assert isinstance(policies.dram.error, TypeError)
    assert policies.choices == {"dram": None, "file": None}
