"""With every policy: what is held stays, caps hold whatever the sizes, and no prefix gets holes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import Planner, Reservation, Steps
from kvstore.decide.planner.demotion import DECIDED_MAX
from kvstore.decide.policy import WriteBudget, policy_by_name
from kvstore.decide.policy.registry import BUILT_IN
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Part, Slot, Span, padded
from kvstore.model.keys import KeyChain, root_key
from tests.decide.planner.spaces import CountingSpace

CAPACITY = 40 * 4096
SPECS = [
    Namespace(2, (Group("full", 4096),), ()),
    Namespace(2, (Group("full", 5000),), (("model", "b"),)),
    Namespace(2, (Group("full", 9000), Group("window", 4096, 5)), (("model", "c"),)),
]
CHAINS = [
    [KeyChain(root_key(spec.id), 2).update([chain] * 24) for chain in range(3)] for spec in SPECS
]


class Room:
    """A space that knows what is in it."""

    def __init__(self) -> None:
        self.used = 0

    def allocate(self, nbytes: int) -> Slot | None:
        if self.used + padded(nbytes) > CAPACITY:
            return None
        self.used += padded(nbytes)
        return Slot(0, 0, nbytes)

    def free(self, place: Slot) -> None:
        self.used -= padded(place.nbytes)
        assert self.used >= 0


def take(steps: Steps[object]) -> object:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def put(planner: Planner, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
    groups = planner.namespace(namespace_id).groups
    spans = tuple(Span(Part(group, 0), 0, len(keys)) for group in range(len(groups)))
    placed = take(planner.puts.place(namespace_id, keys, spans))
    write = Reservation(namespace_id, keys, 0, None, spans, placed.refused)  # type: ignore[attr-defined]
    held = placed.held  # type: ignore[attr-defined]
    with planner.pinned([slot for slot in held if slot is not None]):
        take(planner.puts.commit(write, held, [0] * len(held)))


def resident(planner: Planner) -> dict[BlockKey, BlockKey | None]:
    return {block.key: block.parent for block in planner.index if block.resident_parts}


@settings(deadline=None)
@given(
    st.sampled_from(sorted(BUILT_IN)),
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "ask", "end", "pin", "unpin"]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(1, 12),
            st.floats(0, 500),
        ),
        max_size=60,
    ),
)
def test_evicting_keeps_caps_and_prefixes_and_what_is_held(
    policy: str, steps: list[tuple[str, int, int, int, float]]
) -> None:
    now, room = 0.0, Room()
    planner = Planner(room, None, now=lambda: now, dram_policy=policy_by_name(policy))
    for spec in SPECS:
        planner.index.register(spec)
    pinned: list[tuple[BlockKey, HeldSlot]] = []
    for step, which, chain, blocks, pause_s in steps:
        now += pause_s
        spec, keys = SPECS[which], CHAINS[which][chain][:blocks]
        if step == "put":
            planner.touch(keys)
            put(planner, spec.id, keys)
        elif step == "ask":
            planner.touch(keys)
        elif step == "end":
            planner.end(keys)
        elif step == "pin":
            block = planner.index.by_key(keys[-1])
            for record in block.records if block is not None else ():
                assert record.resident is not None
                record.resident.pins += 1
                pinned.append((keys[-1], record.resident))
        elif pinned:
            _, slot = pinned.pop()
            slot.pins -= 1
        assert room.used <= CAPACITY
        here = resident(planner)
        assert all(key in here for key, _ in pinned)
        assert all(parent is None or parent in here for parent in here.values())


class CountedBudget(WriteBudget):
    """A write budget for everything, that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(1 << 50, lambda: 0.0)
        self.asked_of: list[BlockKey] = []

    def admits(self, key: BlockKey, *args: Any, **more: Any) -> bool:
        self.asked_of.append(key)
        return super().admits(key, *args, **more)


@pytest.mark.parametrize("by", ["write_ahead", "find_slot"])
def test_a_long_prefix_is_decided_in_steps_from_its_start_on(by: str) -> None:
    blocks = 4 * DECIDED_MAX + 1
    spec, budget = SPECS[0], CountedBudget()
    space = CountingSpace(blocks * 4096)
    file = CountingSpace(2 * blocks * 4096)
    planner = Planner(space, file, now=lambda: 0.0, write_budget=budget, write_on_demotion=True)
    planner.index.register(spec)
    keys = KeyChain(root_key(spec.id), 2).update([7] * 2 * blocks)
    put(planner, spec.id, keys)
    steps = asked = 0
    is_decided = False
    while not is_decided:
        if by == "find_slot":
            assert planner.eviction.find_slot(4096) is None, "nothing is written yet"
            assert len(budget.asked_of) - asked <= DECIDED_MAX
            asked = len(budget.asked_of)
        is_decided = planner.eviction.write_ahead(4096)
        assert len(budget.asked_of) - asked <= DECIDED_MAX
        asked, steps = len(budget.asked_of), steps + 1
        assert steps < 100
    assert budget.asked_of == keys
    assert planner.dirty.count > 0
