"""Hazard density keeps the policy contract, and learns who comes back and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.policy import HazardDensity
from kvstore.decide.policy import hazard as hazard_module
from kvstore.decide.policy.ghosts import GHOSTS_MIN, Ghosts
from kvstore.decide.policy.hazard import BINS, FIRST_BIN_S, Hazard, block_class, score
from kvstore.model.block import BlockKey
from kvstore.model.keys import KeyChain
from kvstore.testing.policy import PolicyContract, drained, prefix


def chain(name: int, blocks: int) -> list[BlockKey]:
    """Keys as they are in life: hashes, of which the policy watches a part."""
    return KeyChain(BlockKey(name.to_bytes(32, "big")), 1).update([0] * blocks)


class TestHazardDensity(PolicyContract):
    def make(self, now: Callable[[], float]) -> HazardDensity:
        return HazardDensity(now)

    def ask(self, policy: HazardDensity, blocks: list[BlockKey], at: float) -> None:
        self.time_s = at
        policy.touch(blocks)
        for i, block in enumerate(blocks):
            policy.insert(block, blocks[i - 1] if i else None)

    def test_before_it_has_learned_anything_the_oldest_leaves_first(self) -> None:
        policy = self.filled(prefix(0, 2), prefix(100, 2), prefix(200, 2))
        self.time_s += 60
        assert drained(policy)[:4] == [*prefix(0, 2)[::-1], *prefix(100, 2)[::-1]]

    def test_what_an_ended_session_has_alone_leaves_first(self) -> None:
        shared = prefix(0, 2)
        policy = self.filled([*shared, *prefix(100, 2)], [*shared, *prefix(200, 2)])
        policy.end(policy.alone([*shared, *prefix(200, 2)]))
        assert drained(policy)[:2] == prefix(200, 2)[::-1]

    def test_a_session_that_comes_back_after_all_is_not_over(self) -> None:
        policy = self.filled(prefix(0, 2), prefix(100, 2))
        policy.end(prefix(100, 2))
        self.ask(policy, prefix(100, 3), at=10)
        self.time_s = 60
        assert drained(policy)[:2] == prefix(0, 2)[::-1]

    def test_first_turns_that_never_come_back_leave_before_older_long_conversations(self) -> None:
        """Agents ask every 100 s, for ever; users ask once. LRU would keep the newest user."""
        policy = self.make(lambda: self.time_s)
        assert isinstance(policy, HazardDensity)
        for step in range(60):
            for agent in range(4):
                self.ask(policy, chain(agent, 8 + step), at=100 * step + agent)
            for user in range(8):
                self.ask(policy, chain(1000 + 8 * step + user, 8), at=100 * step + 10 + user)
            for left in policy.victims():
                if len(policy) <= 1000:
                    break
                policy.remove(left)
        agents = {key for agent in range(4) for key in chain(agent, 67)}
        self.time_s = 100 * 59 + 80
        order = drained(policy)
        assert not agents & set(order[:32])

    @given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 100)), max_size=60))
    def test_turns_are_told_by_the_prefix(self, asks: list[tuple[int, float]]) -> None:
        policy = HazardDensity(lambda: self.time_s)
        turn = 0
        for blocks, pause_s in asks:
            self.time_s += pause_s
            policy.touch(chain(0, turn + blocks % 3 + 1))
            turn += blocks % 3 + 1
        newest = policy._begin(chain(0, turn + 1))
        assert newest.turn == len(asks) + 1


def test_the_index_of_a_constant_hazard_is_that_hazard() -> None:
    draw = random.Random(1)
    hazard = Hazard()
    keys = [bytes(31) + bytes([i]) for i in range(64)]
    used = [0.0] * 64
    at = 0.0
    for _ in range(40_000):  # every block is used again with a chance of 0.1 a second
        at += draw.expovariate(0.1 * 64)
        one = draw.randrange(64)
        hazard.watch([BlockKey(keys[one])], 6, 1, at)
        used[one] = at
    hazard.refit(at)
    row = hazard.index[block_class(6, 6, 1)]
    assert [score(row, age) for age in (1.0, 5.0, 15.0)] == pytest.approx([0.1] * 3, rel=0.25)


def test_beyond_the_data_the_index_decays() -> None:
    hazard = Hazard()
    row = hazard.index[0]
    assert all(later < earlier for earlier, later in pairwise(row[8:]))


def test_what_is_watched_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazard_module, "SAMPLES_MAX", 64)
    hazard = Hazard()
    for name in range(300):
        hazard.watch(chain(name, 20), 1, 0, float(name))
    assert len(hazard._slot) <= 64
    hazard.refit(300.0)
    hazard.watch(chain(301, 20), 1, 0, 300.0 + 73 * 3600)
    hazard.refit(300.0 + 73 * 3600)
    assert len(hazard._slot) <= 20  # the others have waited for too long
    assert np.isfinite(hazard.index).all()


@given(st.floats(0, 1e9), st.lists(st.floats(0, 1e6), min_size=BINS + 1, max_size=BINS + 1))
def test_a_score_lies_between_the_ends_of_its_bin(age: float, row: list[float]) -> None:
    found = score(row, age)
    ends = row if age <= FIRST_BIN_S * 2 ** (BINS / 2) else row[-1:]
    assert min(ends) * 0.999999 <= found <= max(ends) * 1.000001


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 400), st.floats(0, 1e8)), max_size=50),
    st.integers(0, 20_000),
)
def test_ghosts_tell_what_they_were_told_or_nothing(
    puts: list[tuple[int, int, float]], blocks: int
) -> None:
    ghosts = Ghosts()
    told: dict[BlockKey, tuple[int, float]] = {}
    for name, uses, at in puts:
        (key,) = chain(name, 1)
        ghosts.put(key, uses, at, blocks=blocks)
        told[key] = min(uses, 255), at
    assert len(ghosts) >= (max(GHOSTS_MIN, 2 * blocks) if puts else GHOSTS_MIN)
    for key, (uses, at) in told.items():
        found = ghosts.find(key)
        if found is not None:
            assert found.uses == uses
            assert found.used_at == pytest.approx(at, abs=0.126)


def test_a_later_life_goes_on_where_the_last_one_was() -> None:
    now = 0.0
    first = HazardDensity(lambda: now)
    paths = [chain(name, 12) for name in range(60)]
    for path in paths:
        now += 5.0
        for blocks in (path[:6], path[:6] if path is paths[-1] else path):
            first.touch(blocks)
            for i, block in enumerate(blocks):
                first.insert(block, blocks[i - 1] if i else None)
    saved = first.save()
    began = now
    now = 3.0  # another life's clock begins anew
    second = HazardDensity(lambda: now)
    second.load(saved)
    for path in paths:
        for i, block in enumerate(path):
            second.adopt(block, path[i - 1] if i else None)
    ends = [path[-1] for path in paths]
    left = [block for block in drained(second) if block in ends]
    # A sample is known, the others are taken for like the block before them.
    assert sum(block in ends[:30] for block in left[:30]) >= 24
    assert began > now
    assert len(second.save()) == len(saved)


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 1000, -1])
def test_what_cannot_be_read_of_another_life_is_ignored(cut: int) -> None:
    first = HazardDensity(lambda: 0.0)
    first.touch(chain(1, 40))
    saved = first.save()
    second = HazardDensity(lambda: 0.0)
    for bad in (saved[:cut], saved + b"x", b"x" + saved[1:], b"\xff" * len(saved)):
        second.load(bad)
    second.insert(chain(1, 1)[0], None)
    assert drained(second) == chain(1, 1)
