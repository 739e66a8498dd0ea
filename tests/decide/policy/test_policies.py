"""What holds of every policy there is, whatever happens; and how one is found."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.policy import policy_by_name, registry
from kvstore.decide.policy.registry import BUILT_IN
from kvstore.model.block import BlockKey
from kvstore.model.errors import ConfigError
from kvstore.testing.policy import key

PATHS = [[key(100 * (i // 2)), *(key(100 * i + j) for j in range(1, 8))] for i in range(6)]
Step = tuple[str, int, int, float]  # what, which path, how many of its blocks, after a pause
NAMES = st.sampled_from(sorted(BUILT_IN))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "put", "adopt", "end", "expect", "hold", "let_go", "remove", "evict"]
        ),
        st.integers(0, 5),
        st.integers(1, 8),
        st.floats(0, 1000),
    ),
    max_size=80,
)


class Tier:
    """A policy, what is in its tier (block -> parent), and what somebody holds."""

    def __init__(self, name: str, held: set[BlockKey]) -> None:
        self.now = 0.0
        self.policy = policy_by_name(name)(lambda: self.now)
        self.here: dict[BlockKey, BlockKey | None] = {}
        self.held = held
        self.pins: list[list[BlockKey]] = []

    def step(self, step: str, path: list[BlockKey]) -> None:
        policy, pairs = self.policy, list(zip(path, [None, *path], strict=False))
        if step == "ask":
            policy.touch(path)
        if step in ("ask", "put", "adopt"):
            admit, order = (policy.adopt, -1) if step == "adopt" else (policy.insert, 1)
            for block, parent in pairs[::order]:
                admit(block, parent)
                self.here.setdefault(block, parent)
        elif step == "end":
            policy.end(path)
        elif step == "expect":
            policy.expect(path, self.now + 10)
        elif step == "hold":
            policy.hold(path)
            self.pins.append(path)
        elif step == "let_go":
            if self.pins:
                policy.let_go(self.pins.pop(0))
        elif step == "remove":
            policy.remove(path[-1])
            self.here.pop(path[-1], None)
        else:
            self.evict(left=8)

    def evict(self, left: int) -> None:
        for victim in self.policy.victims():
            assert victim not in self.here.values()
            assert not any(victim in path for path in self.pins)
            if victim not in self.held:
                self.policy.remove(victim)
                del self.here[victim]
            if len(self.here) <= left:
                break


def ancestors(tier: Tier, blocks: set[BlockKey]) -> set[BlockKey]:
    """Return blocks and all before them that are in the tier."""
    found: set[BlockKey] = set()
    for block in blocks:
        above: BlockKey | None = block
        while above is not None and above in tier.here:
            found.add(above)
            above = tier.here[above]
    return found


@settings(deadline=None)
@given(NAMES, STEPS, st.sets(st.sampled_from([k for path in PATHS for k in path]), max_size=3))
def test_no_parent_leaves_before_its_children_and_nobody_loses_what_is_held(
    name: str, steps: list[Step], held: set[BlockKey]
) -> None:
    play(name, steps, held)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize(
    ("steps", "held"),
    [
        # It was last used when what is held was, ...
        (
            [("ask", 0, 2, 0.0), ("ask", 1, 3, 0.0), ("expect", 0, 1, 0.0)],
            {PATHS[0][0], PATHS[0][1]},
        ),
        # ... or before that, and its child was of another class.
        (
            [
                *[("ask", 3, 3, 0.0), ("expect", 0, 2, 1.0), ("put", 0, 2, 10.0)],
                *[("remove", 1, 2, 10.0), ("ask", 2, 2, 300.0), ("ask", 3, 1, 0.0)],
                ("put", 1, 3, 0.0),
            ],
            {PATHS[2][1], PATHS[2][3], PATHS[3][6]},
        ),
    ],
)
def test_a_parent_that_becomes_a_leaf_behind_what_is_held_leaves_in_the_same_eviction(
    name: str, steps: list[Step], held: set[BlockKey]
) -> None:
    play(name, steps, held)


def play(name: str, steps: list[Step], held: set[BlockKey]) -> None:
    tier = Tier(name, held)
    for step, number, blocks, pause_s in steps:
        tier.now += pause_s
        tier.step(step, PATHS[number][:blocks])
    kept = held & tier.here.keys()
    tier.evict(left=0)
    assert kept <= tier.here.keys()
    pinned = {block for path in tier.pins for block in path}
    assert set(tier.here) == ancestors(tier, (kept | pinned) & tier.here.keys())
    while tier.pins:
        tier.policy.let_go(tier.pins.pop())
    tier.held.clear()
    tier.evict(left=0)
    assert not tier.here


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no eviction policy 'fifo'; choose one of lru, hz"):
        policy_by_name("fifo")


def test_another_package_adds_a_policy_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(group: str) -> EntryPoints:
        mine = EntryPoint("mine", "kvstore.decide.policy:HazardDensity", group)
        gone = EntryPoint("gone", "no_such_package:Policy", group)
        return EntryPoints([mine, gone])

    monkeypatch.setattr(registry, "entry_points", found)
    assert policy_by_name("mine") is BUILT_IN["hz"]
    with pytest.raises(ConfigError, match="'gone' cannot be imported"):
        policy_by_name("gone")
    with pytest.raises(ConfigError, match="lru, hz, gone, mine"):
        policy_by_name("arc")
