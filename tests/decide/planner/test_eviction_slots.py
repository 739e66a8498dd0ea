"""Evicting for records of several sizes, out of a real extent: slots, books, holders and order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import Planner, Reservation
from kvstore.decide.policy import policy_by_name
from kvstore.decide.policy.registry import BUILT_IN
from kvstore.model.block import BlockKey, Group, Namespace, Part, Span, padded
from kvstore.model.keys import KeyChain, root_key
from tests.decide.planner.spaces import CountingSpace, at_once

PAGE = 4096
CAPACITY = 600 * PAGE
ROOMY = 2000 * PAGE  # whatever lies where, it takes the longest prefix if nothing else is there
WINDOW_BLOCKS = 3
SPEC = Namespace(
    2,
    (Group("full", 19 * PAGE, varies=True), Group("window", 88 * PAGE, 6, varies=True)),
    (),
)
CHAINS = [KeyChain(root_key(SPEC.id), 2).update([chain] * 24) for chain in range(10)]


class Arena:
    """A planner over one extent."""

    def __init__(self, policy: str, capacity: int = CAPACITY) -> None:
        self.now = 0.0
        self.space = CountingSpace(capacity)
        self.planner = Planner(
            self.space, None, now=lambda: self.now, dram_policy=policy_by_name(policy)
        )
        self.planner.index.register(SPEC)

    def put(self, keys: Sequence[BlockKey], spread: int) -> int:
        """Put a prefix, with windows at its end; return how many records had no room."""
        begin = max(0, len(keys) - WINDOW_BLOCKS)
        spans = (Span(Part(0, 0), 0, len(keys)), Span(Part(1, 0), begin, len(keys)))
        sizes = [(17 + (i + spread) % 3) * PAGE - 7 for i in range(len(keys))]
        sizes += [(86 + (i + spread) % 3) * PAGE for i in range(len(keys) - begin)]
        self.planner.touch(keys)
        placed = at_once(self.planner.puts.place(SPEC.id, keys, spans, sizes=sizes))
        write = Reservation(SPEC.id, keys, 0, None, spans, placed.refused)
        with self.planner.pinned([slot for slot in placed.held if slot is not None]):
            at_once(self.planner.puts.commit(write, placed.held, [0] * len(placed.held)))
        return placed.refused

    def slots(self) -> list[tuple[int, int]]:
        """Return offset and size of every record, in order."""
        blocks = list(self.planner.index)
        held = [record.resident for block in blocks for record in block.records]
        return sorted((s.slot.offset, padded(s.nbytes)) for s in held if s is not None)

    def here(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Say of each block whether anything of it is in the arena."""
        found = [self.planner.index.by_key(key) for key in keys]
        return [block is not None and block.resident_parts > 0 for block in found]

    def check_books(self) -> None:
        slots = self.slots()
        end = 0
        for offset, size in slots:
            assert offset >= end
            end = offset + size
        assert end <= CAPACITY
        given_out = sum(padded(slot.nbytes) for slot in self.space.live)
        assert given_out == sum(size for _, size in slots) <= CAPACITY


@settings(deadline=None)
@given(
    st.sampled_from(sorted(BUILT_IN)),
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "ask", "pin", "unpin"]),
            st.integers(0, len(CHAINS) - 1),
            st.integers(1, 10),
        ),
        max_size=50,
    ),
)
def test_slots_never_overlap_and_what_is_held_stays_where_it_is(
    policy: str, steps: list[tuple[str, int, int]]
) -> None:
    arena = Arena(policy)
    held: list[tuple[HeldSlot, int]] = []  # and where it is
    for number, (step, chain, blocks) in enumerate(steps):
        arena.now += 1.0
        keys = CHAINS[chain][:blocks]
        if step == "put":
            arena.put(keys, number)
        elif step == "ask":
            arena.planner.touch(keys)
        elif step == "pin":
            block = arena.planner.index.by_key(keys[-1])
            for record in block.records if block is not None else ():
                assert record.resident is not None
                record.resident.pins += 1
                held.append((record.resident, record.resident.place))
        elif held:
            slot, _ = held.pop()
            slot.pins -= 1
        arena.check_books()
        for slot, place in held:
            assert slot.place == place
            assert slot.indexed
            assert slot.slot in arena.space.live


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 8)), max_size=40))
def test_places_do_not_change_the_order_in_which_blocks_leave(
    steps: list[tuple[bool, int, int]],
) -> None:
    """By last use: no prefix loses a block while an older one has any, and the end goes first."""
    arena = Arena("lru", ROOMY)
    prefixes: list[list[BlockKey]] = []  # what is here of each, the one used last at the end
    for number, (is_ask, which, blocks) in enumerate(steps):
        if is_ask and prefixes:
            asked = prefixes.pop(which % len(prefixes))
            arena.planner.touch(asked)
            prefixes.append(asked)
            continue
        new = KeyChain(root_key(SPEC.id), 2).update([number] * 2 * blocks)
        assert arena.put(new, number) == 0
        left = [[key for key in each if arena.here([key])[0]] for each in prefixes]
        for before, after in zip(prefixes, left, strict=True):
            assert after == before[: len(after)]
        oldest_left = next((i for i, after in enumerate(left) if after), len(left))
        assert left[oldest_left + 1 :] == prefixes[oldest_left + 1 :]
        assert all(arena.here(new))
        prefixes = [each for each in left if each] + [new]
