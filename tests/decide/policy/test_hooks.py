"""Hooks compose around any policy, which stays a policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.decide.policy import policy_by_name
from kvstore.decide.policy.hooks import Admission, AttentionWeights, Hooked, Observer, hooked
from kvstore.model.block import BlockKey
from kvstore.testing.policy import PolicyContract, drained, key, prefix


class TestHookedLru(PolicyContract):
    def make(self, now: Callable[[], float]) -> Hooked:
        return Hooked(
            policy_by_name("lru")(now), [Admission(lambda _: True), AttentionWeights(now)]
        )


class TestHookedHz(PolicyContract):
    def make(self, now: Callable[[], float]) -> Hooked:
        return Hooked(policy_by_name("hz")(now), [AttentionWeights(now, 0.0)])


class Scene:
    """A policy with hooks over leaves that came a second apart."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.seen: list[tuple[str, BlockKey]] = []
        self.weights = AttentionWeights(lambda: self.now, protect_s=10.0)
        self.refused = {key(3)}
        self.policy = hooked(
            policy_by_name(name),
            lambda now: Observer(
                lambda block: self.seen.append(("in", block)),
                lambda block: self.seen.append(("out", block)),
            ),
            lambda now: Admission(lambda block: block not in self.refused),
            lambda now: self.weights,
        )(lambda: self.now)
        for number in range(6):
            self.now += 1.0
            self.policy.touch([key(number)])
            self.policy.insert(key(number), None)


@pytest.mark.parametrize("name", ["lru", "hz"])
def test_the_first_hook_has_the_last_word_and_each_is_told(name: str) -> None:
    scene = Scene(name)
    scene.now = 14.0  # blocks 4 and 5, used at 5 s and 6 s, are protected
    scene.weights.weigh(key(0), 5.0)
    scene.weights.weigh(key(2), 0.5)
    scene.weights.weigh(key(5), 0.0)
    assert drained(scene.policy) == [key(number) for number in (3, 2, 1, 0, 4, 5)]
    assert scene.seen[:6] == [("in", key(number)) for number in range(6)]
    assert [block for kind, block in scene.seen if kind == "out"][:2] == [key(3), key(2)]


def test_a_weight_of_what_is_not_there_is_not_kept() -> None:
    scene = Scene("lru")
    scene.weights.weigh(key(77), 0.0)
    scene.policy.remove(key(1))
    scene.policy.remove(key(77))
    scene.policy.insert(key(77), None)
    scene.now = 100.0
    assert drained(scene.policy)[-1] == key(77)
    assert ("out", key(1)) in scene.seen


def test_a_use_protects_again() -> None:
    scene = Scene("lru")
    scene.now = 100.0
    scene.weights.weigh(key(0), 0.0)
    scene.policy.touch([key(0)])
    assert drained(scene.policy)[-1] == key(0)


def test_more_leaves_than_are_weighed_at_once_all_leave() -> None:
    policy = hooked(policy_by_name("lru"), AttentionWeights)(lambda: 0.0)
    blocks = prefix(0, 100)
    for block in blocks:
        policy.insert(block, None)
    assert sorted(policy.victims()) == blocks
    assert sorted(drained(policy)) == blocks
