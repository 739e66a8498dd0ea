"""A tier follows the order that would have hit more lately, as small models of it say."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.policy import HazardDensity, Policy, TailFirstLru
from kvstore.decide.policy.hazard import Hazard
from kvstore.decide.policy.hazard_nodes import Request, Requests
from kvstore.decide.policy.shadow import SHADOW_BLOCKS, Shadows
from kvstore.model.block import BlockKey
from kvstore.replay.mixes import MIXES, synthesize_mix
from kvstore.testing.policy import drained
from tests.decide.policy.test_hazard_density import chain

Ask = tuple[float, list[BlockKey]]


class Tier:
    """A policy over a tier of so many blocks, and how many blocks it has hit."""

    def __init__(self, policy: Policy, room: int) -> None:
        self.policy, self.room = policy, room
        self.here: set[BlockKey] = set()
        self.hits = 0

    def ask(self, keys: Sequence[BlockKey]) -> None:
        missing = [place for place, key in enumerate(keys) if key not in self.here]
        hit = missing[0] if missing else len(keys)
        self.hits += hit
        self.policy.touch(keys)
        kept = set(keys[:hit])
        victims = self.policy.victims()
        while len(self.here) + len(missing) > self.room:
            victim = next(victims, None)
            if victim is None:
                break
            if victim not in kept:
                self.policy.remove(victim)
                self.here.remove(victim)
        for place in missing[: self.room - len(self.here)]:
            self.policy.insert(keys[place], keys[place - 1] if place else None)
            self.here.add(keys[place])


class Race:
    """The same traffic through `hz`, through what it follows alone, and through `lru`."""

    def __init__(self, room: int, shadow_blocks: int = SHADOW_BLOCKS) -> None:
        self.now = 0.0
        self.hz = HazardDensity(self.clock, shadow_blocks=shadow_blocks)
        self.tiers = {
            "hz": Tier(self.hz, room),
            "hazard": Tier(HazardDensity(self.clock, shadow_blocks=0), room),
            "lru": Tier(TailFirstLru(), room),
        }

    def clock(self) -> float:
        return self.now

    def run(self, asks: Iterable[Ask]) -> dict[str, int]:
        for at, keys in asks:
            self.now = at
            for tier in self.tiers.values():
                tier.ask(keys)
        return {name: tier.hits for name, tier in self.tiers.items()}


def cycle(documents: int, rounds: int, blocks: int = 6) -> list[Ask]:
    """Documents that come round in turn, a second apart: none is used again before all others."""
    paths = [chain(name, blocks) for name in range(documents)]
    return [(float(n), paths[n % documents]) for n in range(rounds * documents)]


def mixed(name: str, requests: int, seed: int = 1) -> list[Ask]:
    keys: dict[int, BlockKey] = {}
    asks = []
    for asked in synthesize_mix(MIXES[name], requests=requests, seed=seed):
        full = asked.blocks[: asked.tokens // 512]
        for block in full:
            if block not in keys:
                keys[block] = chain(block, 1)[0]
        if full:
            asks.append((asked.at_s, [keys[block] for block in full]))
    return asks


def test_where_last_use_says_nothing_it_goes_by_hazard() -> None:
    race = Race(room=300)
    hits = race.run(cycle(documents=100, rounds=12))
    assert hits["lru"] == 0
    assert hits["hz"] > 0.9 * hits["hazard"] > 0
    choice = race.hz.choice
    assert choice is not None
    assert choice.follows == "hz"
    assert choice.hit_ratios["hz"] > choice.hit_ratios["lru"] == 0


def test_where_hazard_is_wrong_it_goes_by_last_use_and_loses_little() -> None:
    """Returning users, then documents in turn: what was learned of the ones misleads of the others.

    Where both orders hit nearly the same, or traffic is short, chance decides: `make policies`.
    """
    asks = mixed("shift-to-and-fro", 2500)
    race = Race(room=len({key for _, keys in asks for key in keys}) // 5)
    hits = race.run(asks)
    assert hits["hazard"] < 0.97 * hits["lru"], "this traffic is to be hard for hazard"
    assert hits["hz"] > 0.995 * hits["lru"]
    assert race.hz.choice is not None
    assert race.hz.choice.switches > 0


def test_it_follows_a_change_of_the_traffic_both_ways() -> None:
    asks = cycle(documents=100, rounds=12)
    draw, end = random.Random(1), asks[-1][0]
    # Then what was used last is used again: hazard, that has learned the cycle, keeps the rest.
    stack = [chain(1000 + name, 6) for name in range(400)]
    for n in range(1500):
        at = min(int(draw.expovariate(1 / 25)), len(stack) - 1)
        stack.insert(0, stack.pop(at))
        asks.append((end + n, stack[0]))
    race = Race(room=300)
    hits = race.run(asks)
    assert hits["hz"] > 0.97 * max(hits["hazard"], hits["lru"])


def test_it_does_not_flap_where_both_hit_about_as_much() -> None:
    draw = random.Random(2)
    paths = [chain(name, 5) for name in range(200)]
    race = Race(room=400)
    race.run((float(n), draw.choice(paths)) for n in range(1600))
    assert race.hz.choice is not None
    assert race.hz.choice.switches <= 8, "it was asked for 20 times what it has room for"


def test_each_time_that_it_has_lost_by_hazard_it_asks_for_more() -> None:
    """Two orders that are equally good: their difference goes up and down."""
    shadows = Shadows(Hazard(), Requests())
    shadows._squares = 100.0  # ten blocks are what chance makes of it

    def switches_at(step: float) -> float:
        """Let the sum grow, for one order or the other, until it is enough."""
        shadows._ahead = 0.0
        for _ in range(1000):
            if shadows._is_time_to_switch():
                break
            shadows._ahead += step
        return abs(shadows._ahead)

    def lose() -> None:
        shadows._gain = -1.0
        assert switches_at(-0.5) == 10.5

    assert switches_at(-0.5) == 10.5  # it began by hazard, which says nothing
    assert switches_at(0.5) == 15.5
    lose()
    assert switches_at(0.5) == 23.0
    lose()
    assert switches_at(0.5) == 34.0
    for _ in range(5):
        lose()
        last = switches_at(0.5)
    assert last == 51.0  # no more than that
    shadows._gain = 1.0
    assert switches_at(-0.5) == 10.5
    assert switches_at(0.5) == 34.0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.floats(0, 400)), max_size=120),
    st.integers(4, 40),
)
def test_by_last_use_alone_it_is_lru(asks: list[tuple[int, int, float]], room: int) -> None:
    now = 0.0
    ours = HazardDensity(lambda: now, shadow_blocks=0)
    ours._leaves.by_use = True
    tiers = [Tier(ours, room), Tier(TailFirstLru(), room)]
    paths = [[*chain(name // 3, 4), *chain(100 + name, 5)] for name in range(13)]
    for name, blocks, pause_s in asks:
        now += pause_s
        for tier in tiers:
            tier.ask(paths[name][:blocks])
        assert tiers[0].here == tiers[1].here
    assert drained(tiers[0].policy) == drained(tiers[1].policy)


@pytest.mark.parametrize("blocks_max", [64, SHADOW_BLOCKS])
def test_its_memory_is_bounded_and_half_of_a_sample_is_a_sample(blocks_max: int) -> None:
    hazard = Hazard()
    asks = [chain(name, 12) for name in range(1500)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    shadows = Shadows(hazard, Requests(), blocks_max)
    for order, keys in enumerate(asks):
        shadows.room(15_000)
        shadows.ask(keys, Request(float(order), 1, 0, object(), order=order))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    choice = shadows.choice
    assert blocks_max / 4 < choice.blocks <= blocks_max
    assert choice.share == pytest.approx(choice.blocks / (1500 * 12), rel=0.3)
    assert used < 800 * blocks_max + 200_000  # ghosts have their least size


def test_what_comes_before_a_block_still_does_when_the_sample_is_halved() -> None:
    shadows = Shadows(Hazard(), Requests(), 40)
    paths = [[*chain(name // 5, 3), *chain(50 + name, 5)] for name in range(40)]
    for order, keys in enumerate(paths):
        shadows.ask(keys, Request(float(order), 1, 0, object(), order=order))
    tree = shadows._by_hazard.tree
    assert shadows.choice.share <= 0.5
    for path in paths:
        here = [row for row in map(tree.find, path) if row]
        for above, row in pairwise(here):
            assert tree.parents[row] == above
            assert tree.children[above]


def test_without_models_it_goes_by_hazard_and_has_no_choice() -> None:
    assert HazardDensity(lambda: 0.0, shadow_blocks=0).choice is None


def test_another_life_begins_with_the_order_that_was_followed() -> None:
    race = Race(room=300)
    race.hz._shadows.by_use = True  # type: ignore[union-attr]
    race.hz.touch(chain(1, 40))
    later = HazardDensity(lambda: 0.0)
    later.load(race.hz.save())
    assert later.choice is not None
    assert later.choice.follows == "lru"
    assert later._leaves.by_use


def test_the_same_traffic_makes_the_same_choices() -> None:
    asks = mixed("scan-bursts", 400)
    hits = [Race(room=500, shadow_blocks=128).run(asks) for _ in range(2)]
    assert hits[0] == hits[1]
