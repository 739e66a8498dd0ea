"""Slots never overlap, stay inside the extent, and freeing everything gives all of it back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstore.model.block import padded
from kvstore.tier.dram.allocator import KEPT_SHARE, ExtentAllocator

CAPACITY = 64 * 4096


class AllocatorMachine(RuleBasedStateMachine):
    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY)
        self.live: dict[int, int] = {}

    @rule(target=slots, nbytes=st.integers(1, 20 * 4096))
    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            assert self.largest_gap() < padded(nbytes)
            return None
        assert offset % 4096 == 0
        assert offset + nbytes <= CAPACITY
        self.live[offset] = padded(nbytes)
        return offset, nbytes

    @rule(slot=consumes(slots))
    def free(self, slot: tuple[int, int] | None) -> None:
        if slot is not None:
            self.allocator.free(*slot)
            del self.live[slot[0]]

    def largest_gap(self) -> int:
        edges = [(0, 0), *sorted(self.live.items()), (CAPACITY, 0)]
        return max(b[0] - a[0] - a[1] for a, b in pairwise(edges))

    @invariant()
    def nothing_overlaps(self) -> None:
        end = 0
        for offset, size in sorted(self.live.items()):
            assert offset >= end
            end = offset + size
        assert self.allocator.used == sum(self.live.values())


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_neighbours_merge_so_that_a_large_record_fits_again() -> None:
    allocator = ExtentAllocator(CAPACITY)
    offsets = [allocator.allocate(4096) for _ in range(64)]
    assert allocator.allocate(1) is None
    for offset in [*offsets[::2], *offsets[1::2]]:
        assert offset is not None
        allocator.free(offset, 4096)
    assert allocator.allocate(CAPACITY) == 0


def extent_with_gaps(pages: int, gaps: list[int]) -> ExtentAllocator:
    """Return an extent without room, but for gaps of so many pages, apart from each other."""
    allocator = ExtentAllocator(pages * 4096)
    for size in gaps:
        allocator.allocate(size * 4096)
        allocator.allocate(4096)
    while allocator.allocate(4096) is not None:
        pass
    at = 0
    for size in gaps:
        allocator.free(at * 4096, size * 4096)
        at += size + 1
    return allocator


def test_a_gap_a_little_too_large_is_kept_for_its_own_size() -> None:
    allocator = extent_with_gaps(64 * KEPT_SHARE, [53])
    assert allocator.allocate(52 * 4096) is None
    assert allocator.allocate(53 * 4096) == 0


def test_not_much_is_kept() -> None:
    allocator = extent_with_gaps(64 * KEPT_SHARE, [53, 53, 53])
    assert allocator.allocate(52 * 4096) is not None


def test_a_gap_of_which_something_useful_is_left_is_taken() -> None:
    allocator = extent_with_gaps(64 * KEPT_SHARE, [53, 60])
    assert allocator.allocate(52 * 4096) == 54 * 4096
