"""Slots never overlap, stay inside the extent, and freeing everything gives all of it back."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstore.model.block import padded
from kvstore.model.errors import InvalidRequest
from kvstore.tier.dram.allocator import KEPT_SHARE, STRIP_NBYTES, ExtentAllocator

CAPACITY = 64 * 4096
STRIP_PAGES = STRIP_NBYTES // 4096


class AllocatorMachine(RuleBasedStateMachine):
    """Beside the allocator, the slots and withdrawn runs there must be, and when each slot came."""

    slots = Bundle("slots")
    capacity = CAPACITY
    nbytes_min = 1

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(self.capacity)
        self.live: dict[int, int] = {}
        self.gone: list[tuple[int, int]] = []
        self.came: dict[int, int] = {}  # by offset
        self.count = 0

    @rule(target=slots, nbytes=st.integers(1, 20 * 4096))
    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        nbytes += self.nbytes_min - 1
        gaps = self.gaps()
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            assert max((end - begin for begin, end in gaps), default=0) < padded(nbytes)
            return None
        assert offset % 4096 == 0
        assert offset + nbytes <= self.capacity
        self.is_cut_right(next(gap for gap in gaps if gap[0] <= offset < gap[1]), offset, nbytes)
        self.live[offset] = padded(nbytes)
        self.count += 1
        self.came[offset] = self.count
        return offset, nbytes

    def is_cut_right(self, gap: tuple[int, int], offset: int, nbytes: int) -> None:
        assert offset == gap[0] or offset + padded(nbytes) == gap[1]

    @rule(slot=consumes(slots))
    def free(self, slot: tuple[int, int] | None) -> None:
        if slot is not None:
            self.allocator.free(*slot)
            del self.live[slot[0]]
            with pytest.raises(InvalidRequest, match="no slot of"):
                self.allocator.free(*slot)

    @rule(nbytes=st.integers(0, 4 * 4096))
    def withdraw(self, nbytes: int) -> None:
        gaps = self.gaps()
        taken = self.allocator.withdraw(nbytes)
        for begin, end in taken:
            assert any(gap[0] <= begin < end <= gap[1] for gap in gaps)
        self.gone += taken

    def gaps(self) -> list[tuple[int, int]]:
        """Return what is free, as (begin, end), from what is not."""
        taken = [(offset, offset + size) for offset, size in self.live.items()]
        edges = [(0, 0), *sorted(taken + self.gone), (self.capacity, self.capacity)]
        return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]

    @invariant()
    def nothing_overlaps_and_the_books_add_up(self) -> None:
        end = 0
        for offset, size in sorted(self.live.items()):
            assert offset >= end
            end = offset + size
        allocator = self.allocator
        assert allocator.used == sum(self.live.values())
        assert allocator.withdrawn == sum(end - begin for begin, end in self.gone)
        free = sum(end - begin for begin, end in self.gaps())
        assert allocator.used + allocator.withdrawn + free == self.capacity


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class LargeSlotsMachine(AllocatorMachine):
    """Slots as large as a strip or larger: each lies beside the neighbour that came last."""

    capacity = 12 * STRIP_NBYTES + 4096
    nbytes_min = STRIP_NBYTES

    def is_cut_right(self, gap: tuple[int, int], offset: int, nbytes: int) -> None:
        super().is_cut_right(gap, offset, nbytes)
        begin, end = gap
        before = next((o for o, size in self.live.items() if o + size == begin), None)
        if end - begin > padded(nbytes) and before is not None and end in self.live:
            is_newer_after = self.came[end] > self.came[before]
            assert offset == (end - padded(nbytes) if is_newer_after else begin)

    def withdraw(self, nbytes: int) -> None:
        """Not here: what was withdrawn has no age."""


TestLargeSlots = LargeSlotsMachine.TestCase
TestLargeSlots.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


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
    assert allocator.allocate(52 * 4096) == (54 + 60 - 52) * 4096


def test_a_new_extent_is_filled_from_its_start() -> None:
    size = STRIP_NBYTES
    allocator = ExtentAllocator(8 * size)
    assert [allocator.allocate(size) for _ in range(8)] == [size * each for each in range(8)]


def test_what_is_left_of_a_run_is_where_it_grows() -> None:
    """Three slots leave from the last on: larger ones take their place, without a gap between."""
    pages = STRIP_PAGES
    allocator = ExtentAllocator(5 * pages * 4096)
    old = [allocator.allocate(pages * 4096) for _ in range(4)]
    newest = allocator.allocate(pages * 4096)
    assert newest == 4 * pages * 4096
    for offset in (old[3], old[2]):
        assert offset is not None
        allocator.free(offset, pages * 4096)
    size = (pages + 2) * 4096
    first = allocator.allocate(size)
    assert first == newest - size
    assert old[1] is not None
    allocator.free(old[1], pages * 4096)
    assert allocator.allocate(size) == first - size


def test_sizes_mixed_fill_an_extent_through_which_prefixes_pass() -> None:
    """Each prefix leaves from its end on, as the oldest of all: what is free is hardly more than a
    gap for each."""
    allocator = ExtentAllocator(60 << 20)
    prefixes: deque[list[tuple[int, int]]] = deque()
    fills = []
    for number in range(200):
        prefix: list[tuple[int, int]] = []
        for block in range(40):
            for pages in (17 + (number + block) % 3, *((87,) if block >= 24 else ())):
                while (offset := allocator.allocate(pages * 4096)) is None:
                    allocator.free(*prefixes[0].pop())
                    if not prefixes[0]:
                        prefixes.popleft()
                prefix.append((offset, pages * 4096))
        prefixes.append(prefix)
        fills.append(allocator.used / allocator.capacity)
    assert sum(fills[20:]) / len(fills[20:]) > 0.96
