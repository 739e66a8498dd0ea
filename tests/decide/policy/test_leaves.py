"""Leaves in rings: what leaves first, and how little is looked at for each leaf that comes."""

from __future__ import annotations

import random

import pytest

from kvstore.decide.policy.hazard_density import HazardDensity
from kvstore.decide.policy.leaves import SIFTED, Leaves
from kvstore.model.block import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries were looked at since this was cleared."""
    seen: list[int] = []
    is_good = Leaves._is_good

    def counting(self: Leaves, ring: object, entry: object) -> bool:
        seen.append(1)
        return is_good(self, ring, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Leaves, "_is_good", counting)
    return seen


def test_no_leaf_that_comes_makes_a_whole_heap_be_looked_at(looked_at: list[int]) -> None:
    clock = Clock()
    policy = HazardDensity(clock, shadow_blocks=0)
    drawn = random.Random(1)
    most = 0
    for number in range(3000):
        policy.insert(key(number), None)
    for _ in range(20_000):
        clock.at += 0.01
        looked_at.clear()
        policy.touch([key(drawn.randrange(3000))])
        most = max(most, len(looked_at))
    assert 0 < most <= SIFTED


def test_what_is_stale_does_not_fill_a_ring() -> None:
    clock = Clock()
    policy = HazardDensity(clock, shadow_blocks=0)
    for number in range(100):
        policy.insert(key(number), None)
    for step in range(50_000):
        clock.at += 0.01
        policy.touch([key(step % 100)])
    rings = policy._leaves._rings.values()
    assert sum(len(ring.heap) + len(ring.old) for ring in rings) < 3 * 100 * len(rings)


def test_the_order_is_that_of_use_while_a_heap_is_made_anew() -> None:
    """Victims are taken at any moment, also while entries go over from an old heap."""
    clock = Clock()
    policy = HazardDensity(clock, shadow_blocks=0)
    policy._leaves.by_use = True
    drawn = random.Random(2)
    used: dict[int, float] = {}
    sifting = 0
    for number in range(20_000):
        clock.at += 0.01
        if number < 500 or drawn.random() < 0.1:
            policy.insert(key(number), None)
            policy.touch([key(number)])
            used[number] = clock.at
        elif drawn.random() < 0.9:
            again = drawn.choice(list(used))
            policy.touch([key(again)])
            used[again] = clock.at
        elif len(used) > 100:
            sifting += any(ring.old for ring in policy._leaves._rings.values())
            victim = next(iter(policy.victims()))
            oldest = min(used, key=lambda each: used[each])
            assert victim == key(oldest)
            policy.remove(victim)
            del used[oldest]
    assert sifting > 50
