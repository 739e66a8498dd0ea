"""LRU that takes over a full tier learns of its blocks a few at a time, and loses none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.decide.planner import Planner, Reservation
from kvstore.decide.policy import TailFirstLru, late_lru
from kvstore.decide.policy.late_lru import REQUEST_ROWS, STEP_ROWS, WALK_ROWS_MAX, LateLru, Links
from kvstore.decide.resting import Resting
from kvstore.decide.rows import FIRST_ROW, Rows
from kvstore.decide.walks import Walks
from kvstore.model.block import BlockKey, Group, Namespace, Part, Span
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.policy import PolicyContract, key, prefix
from tests.decide.planner.spaces import CountingSpace, at_once

SPEC = Namespace(2, (Group("all", 4096),), ())
BLOCKS, PREFIX_BLOCKS = 100_000, 500
IN_ONE_CALL = STEP_ROWS + 2 * REQUEST_ROWS


class Books:
    """The blocks of a tier, in the order of their rows."""

    def __init__(self, blocks: Sequence[tuple[BlockKey, BlockKey | None]] = ()) -> None:
        self.rows = list(blocks)
        self.gone: set[BlockKey] = set()
        self.looked_at = 0

    @property
    def end(self) -> int:
        return FIRST_ROW + len(self.rows)

    def within(self, begin: int, end: int) -> Links:
        found = self.rows[begin - FIRST_ROW : end - FIRST_ROW]
        self.looked_at += len(found)
        return [each for each in found if each[0] not in self.gone]

    def among(self, keys: Sequence[BlockKey]) -> Links:
        return [each for each in self.rows if each[0] in set(keys) - self.gone]

    def evict(self, policy: LateLru, blocks: int) -> list[BlockKey]:
        left: list[BlockKey] = []
        for victim in policy.victims():
            self.gone.add(victim)
            policy.remove(victim)
            left.append(victim)
            if len(left) == blocks:
                break
        return left


class TestLateLru(PolicyContract):
    def make(self, now: Callable[[], float]) -> LateLru:
        return LateLru(Books())


def linked(blocks: list[BlockKey]) -> list[tuple[BlockKey, BlockKey | None]]:
    return list(zip(blocks, [None, *blocks], strict=False))


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it learn of one or two blocks at a time."""
    for name, rows in (("BLOCK_ROWS", 1), ("REQUEST_ROWS", 1), ("STEP_ROWS", 2)):
        monkeypatch.setattr(late_lru, name, rows)


@pytest.mark.usefixtures("slowly")
def test_what_it_learns_leaves_before_what_was_used_or_came_since() -> None:
    old, used, new = prefix(0, 20), prefix(100, 5), prefix(200, 3)
    books = Books(linked(old) + linked(used))
    policy = LateLru(books)
    policy.touch(used)
    for block, parent in linked(new):
        policy.insert(block, parent)
    left = books.evict(policy, 100)
    assert sorted(left[:20]) == sorted(old)
    assert left[20:] == [*used[::-1], *new[::-1]]


@pytest.mark.usefixtures("slowly")
def test_what_is_held_stays_and_what_it_does_not_know_yet_may_leave() -> None:
    books = Books(linked(prefix(0, 20)))
    policy = LateLru(books)
    policy.hold(prefix(0, 10))
    gone = key(19)
    policy.remove(gone)  # it does not know it
    books.gone.add(gone)
    assert sorted(books.evict(policy, 100)) == prefix(10, 9)
    policy.let_go(prefix(0, 10))
    assert policy.is_leaf(key(9))
    assert policy.alone(prefix(0, 20)) == prefix(0, 10)
    assert books.evict(policy, 100) == prefix(0, 10)[::-1]


def test_what_nobody_may_evict_is_yielded_once_and_few_rows_are_looked_at() -> None:
    books = Books([(key(number), None) for number in range(3 * WALK_ROWS_MAX)])
    policy = LateLru(books)
    books.looked_at = 0
    passed = list(policy.victims())
    assert len(set(passed)) == len(passed) >= WALK_ROWS_MAX
    assert books.looked_at <= WALK_ROWS_MAX + STEP_ROWS


def test_rows_of_who_was_there_before_are_given_back() -> None:
    rows = Rows()
    before = [rows.keeper() for _ in range(7)]
    for keeper in before:
        for block in prefix(0, 3000):
            rows.keep(block, keeper)
    rows.retire(before[0], ())
    policy = LateLru(Books(), rows)
    with pytest.raises(RuntimeError):
        rows.keeper()
    for number in range(5000, 5400):
        policy.insert(key(number), None)
    assert rows.keeper() == before[0]
    assert not list(rows.kept(before[0]))
    assert len(list(rows.kept(before[1]))) == 3000


# ---- in a planner ------------------------------------------------------------------------------


class Failing:
    """A policy of another package that works until it is told to fail."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        if self.fails and name != "retire":
            raise ZeroDivisionError(name)
        return getattr(self._inner, name)

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        self.__getattr__("touch")(prefix)


class Full:
    """A planner whose arena is full of prefixes; counts what each call looks at, and wakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Failing] = []

        def policy(now: Callable[[], float], rows: Rows | None = None) -> Failing:
            self.made.append(Failing(TailFirstLru(rows)))
            return self.made[-1]

        space = CountingSpace(BLOCKS * 4096)
        self.planner = Planner(space, None, now=lambda: 0.0, dram_policy=policy)  # type: ignore[arg-type]
        self.planner.index.register(SPEC)
        for name in range(BLOCKS // PREFIX_BLOCKS):
            self.put(name)
        self.planner.index.rest()
        self.looked_at = self.woken = 0
        wake, parents = Resting.wake, Walks.parents

        def counted_wake(resting: Resting, row: int) -> Any:
            self.woken += 1
            return wake(resting, row)

        def counted_parents(walks: Walks, rows: Sequence[int], *, framed: bool) -> Iterator[Any]:
            self.looked_at += len(rows)
            return parents(walks, rows, framed=framed)

        monkeypatch.setattr(Resting, "wake", counted_wake)
        monkeypatch.setattr(Walks, "parents", counted_parents)

    def keys(self, name: int) -> list[BlockKey]:
        return KeyChain(root_key(SPEC.id), 2).update([name] * 2 * PREFIX_BLOCKS)

    def put(self, name: int, blocks: int = PREFIX_BLOCKS) -> None:
        keys = self.keys(name)[:blocks]
        spans = (Span(Part(0, 0), 0, blocks),)
        placed = at_once(self.planner.puts.place(SPEC.id, keys, spans))
        assert placed.refused == 0
        put = Reservation(SPEC.id, keys, 0, None, spans, placed.refused)
        at_once(self.planner.puts.commit(put, placed.held, [7] * blocks))

    def counts(self) -> tuple[int, int]:
        found = self.looked_at, self.woken
        self.looked_at = self.woken = 0
        return found


def test_no_call_waits_for_a_large_tier_to_be_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch)
    full.made[0].fails = True
    full.planner.touch(full.keys(3)[:10])
    assert full.planner.policies.dram.error is not None
    looked_at, woken = full.counts()
    assert looked_at <= IN_ONE_CALL
    assert woken <= 10
    for name in range(1000, 1020):
        full.put(name, blocks=1)
        looked_at, woken = full.counts()
        assert looked_at <= IN_ONE_CALL
        assert woken <= 16
    keys = full.keys(3)[:10]
    assert full.planner.match(SPEC.id, keys).hit_blocks == 10, "it was used last"


def test_all_that_a_large_tier_had_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch)
    full.made[0].fails = True
    for name in range(1000, 1000 + BLOCKS // PREFIX_BLOCKS):
        full.put(name)
    assert len(full.planner.index) == BLOCKS
    assert full.planner.stored.resident == BLOCKS
    last = full.keys(999 + BLOCKS // PREFIX_BLOCKS)
    assert full.planner.match(SPEC.id, last).hit_blocks == PREFIX_BLOCKS


def test_what_lies_behind_rows_of_another_tier_leaves_before_what_was_just_used() -> None:
    elsewhere = 2 * WALK_ROWS_MAX
    books = Books(linked([key(at) for at in range(elsewhere)]))
    books.gone = {block for block, _ in books.rows}
    unused, used = prefix(elsewhere + 1, 3), prefix(elsewhere + 9, 3)
    books.rows += [*linked(list(unused)), *linked(list(used))]
    policy = LateLru(books)
    policy.touch(used)
    assert books.evict(policy, 3) == list(reversed(unused))
