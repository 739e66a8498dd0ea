"""A policy that takes a whole run that was found on disk is in the same state as one that took its
blocks one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.policy.guarded import Guarded
from kvstore.decide.policy.hazard_density import HazardDensity
from kvstore.decide.policy.hazard_nodes import Blocks
from kvstore.decide.policy.late_lru import LateLru, NothingStored
from kvstore.decide.policy.lru import TailFirstLru
from kvstore.decide.policy.prefix_tree import PrefixTree
from kvstore.decide.rows import STEP_ROWS, Rows
from kvstore.model.block import BlockKey
from tests.decide.policy.test_hazard_density import chain

CHAINS = [chain(number, 10) for number in range(3)]
KNOWN = CHAINS[1][:8]
SAMPLED = KNOWN[6]  # `hz` remembers the last uses of a sample of blocks


def _saved() -> bytes:
    life = HazardDensity(lambda: 5.0)
    life.touch(KNOWN)
    for at, key in enumerate(KNOWN):
        life.insert(key, KNOWN[at - 1] if at else None)
    return life.save()


SAVED = _saved()


def test_an_earlier_life_tells_of_one_of_these_blocks() -> None:
    hazard = hz_that_knows(lambda: 0.0, Rows())._hazard
    assert [key for path in CHAINS for key in path if hazard.last_use(key)] == [SAMPLED]


def lru(now: Callable[[], float], rows: Rows) -> TailFirstLru:
    return TailFirstLru(rows)


def late_lru(now: Callable[[], float], rows: Rows) -> LateLru:
    return LateLru(NothingStored(), rows)


def hz(now: Callable[[], float], rows: Rows) -> HazardDensity:
    return HazardDensity(now, rows=rows)


def hz_that_knows(now: Callable[[], float], rows: Rows) -> HazardDensity:
    policy = HazardDensity(now, rows=rows)
    policy.load(SAVED)
    return policy


FACTORIES = [lru, late_lru, hz, hz_that_knows]


class Side:
    """A policy on the rows of an index. in_one: it takes a run in one."""

    def __init__(self, factory: Any, *, in_one: bool) -> None:
        self.at = 0.0
        self.rows = Rows()
        self.index = self.rows.keeper()
        self.policy = factory(lambda: self.at, self.rows)
        self.in_one = in_one
        self.held: list[Sequence[BlockKey]] = []

    def find(self, keys: Sequence[BlockKey], parent: BlockKey | None, *, indexed: bool) -> None:
        if indexed:
            for key in keys:
                self.rows.keep(key, self.index)
        if self.in_one:
            self.policy.adopt_run(keys, parent)
            return
        for key, above in zip(keys, [parent, *keys[:-1]], strict=True):
            self.policy.adopt(key, above)

    def do(self, step: tuple[Any, ...]) -> None:
        self.at += 1.0
        name, path, first, count = step[:4]
        keys = CHAINS[path][first : first + count]
        parent = CHAINS[path][first - 1] if first else None
        if name == "find":
            self.find(keys, parent, indexed=step[4])
        elif name == "insert":
            self.policy.insert(keys[0], parent)
        elif name == "touch":
            self.policy.touch(CHAINS[path][: first + count])
        elif name == "remove":
            self.policy.remove(keys[0])
        elif name == "hold":
            self.policy.hold(keys)
            self.held.append(keys)
        elif self.held:
            self.policy.let_go(self.held.pop())

    @property
    def facts(self) -> list[tuple[Any, ...]]:
        """What is known of every block that is here or somebody's parent, and who leaves when."""
        tree: PrefixTree = self.policy._tree
        keys = self.rows.keys
        found: list[tuple[Any, ...]] = [(len(self.policy),)]
        for path in CHAINS:
            for key in path:
                row = self.rows.find(key)
                parent = keys[tree.parents[row]] if tree.parents[row] else None
                found.append((key, tree.here[row], tree.children[row], parent))
                if isinstance(tree, Blocks) and tree.here[row]:
                    request = tree.request(row)
                    found.append((tree.uses[row], tree.marks[row], request.at, request.turn))
                    found.append((request.order, request.blocks, bool(tree.ring_of[row])))
        while self.held:
            self.policy.let_go(self.held.pop())
        while victim := next(self.policy.victims(), None):
            found.append((victim,))
            self.policy.remove(victim)
        return found


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["find", "find", "find", "insert", "touch", "remove", "hold", "let_go"]),
        st.integers(0, 2),
        st.integers(0, 9),
        st.integers(1, 6),
        st.booleans(),
    ),
    max_size=12,
)


@pytest.mark.parametrize("factory", FACTORIES)
@given(STEPS)
def test_a_run_in_one_is_the_same_as_its_blocks(factory: Any, steps: list[tuple[Any, ...]]) -> None:
    sides = [Side(factory, in_one=in_one) for in_one in (False, True)]
    for side in sides:
        for step in steps:
            side.do(step)
    assert sides[0].facts == sides[1].facts


@pytest.mark.parametrize("factory", FACTORIES)
def test_most_runs_are_taken_in_one(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare one way with itself."""
    taken: list[bool] = []
    enter_after = PrefixTree.enter_after

    def noted(tree: PrefixTree, row: int, keys: Sequence[BlockKey]) -> range | None:
        rows = enter_after(tree, row, keys)
        taken.append(rows is not None)
        return rows

    monkeypatch.setattr(PrefixTree, "enter_after", noted)
    side = Side(factory, in_one=True)
    path = chain(7, 2 * STEP_ROWS)
    for first in range(0, len(path), 16):
        parent = path[first - 1] if first else None
        side.find(path[first : first + 16], parent, indexed=True)
    assert len(side.policy) == len(path)
    assert taken.count(False) <= 3  # where a step of rows ends
    assert len(taken) == len(path) // 16


def test_a_run_with_a_gap_is_taken_block_by_block_and_a_policy_may_know_no_runs() -> None:
    class Plain(TailFirstLru):
        adopt_run = None  # type: ignore[assignment]

    keys = CHAINS[0]
    for factory in (lambda now: Plain(), lambda now: TailFirstLru()):
        guarded = Guarded(factory, lambda: 0.0)
        guarded.adopt_all(keys[:4], [None, *keys[:3]])
        guarded.adopt_all(keys[5:7], [None, None])
        assert list(guarded.victims())[:1] == [keys[3]]
        assert guarded.error is None


def test_what_fails_at_a_run_gives_way_to_lru() -> None:
    class Fails(TailFirstLru):
        def adopt_run(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
            raise ValueError("no runs")

    keys = CHAINS[0]
    guarded = Guarded(lambda now: Fails(), lambda: 0.0)
    guarded.adopt_all(keys[:4], [None, *keys[:3]])
    assert isinstance(guarded.error, ValueError)
    assert guarded.is_leaf(keys[3])
    assert not guarded.is_leaf(keys[2])
