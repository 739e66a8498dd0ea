"""The arena's pages are huge where the kernel makes them so, and what lies in them stays."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.system.shared_mapping import SharedMapping
from kvstore.testing.wait import until
from kvstore.tier.dram import Arena, makes_huge_pages
from kvstore.tier.dram.extent_memory import (
    HUGE_NBYTES,
    collapse,
    make_extent,
    make_touched_extent,
    present_nbytes,
    punch,
    touch,
)

NBYTES = 8 * HUGE_NBYTES
needs_huge_pages = pytest.mark.skipif(not makes_huge_pages(), reason="the kernel makes none")


def huge_nbytes(fd: int, nbytes: int) -> int:
    """Return how much of an extent a mapping that begins where huge pages may has as such."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    room = nbytes + HUGE_NBYTES
    begin = libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    first = -(-begin // HUGE_NBYTES) * HUGE_NBYTES
    assert libc.mmap(first, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, fd, 0) == first
    try:
        ctypes.string_at(first, nbytes)  # every page is looked at
        return mapped_huge_nbytes(first)
    finally:
        libc.munmap(begin, room)


def mapped_huge_nbytes(address: int) -> int:
    """Return how much of the mapping that begins at an address is mapped as huge pages."""
    with open("/proc/self/smaps", encoding="ascii") as file:
        ours = file.read().split(f"{address:x}-", 1)[1]
    found = re.search(r"ShmemPmdMapped: *([0-9]+) kB", ours)
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def opened(fd: int, mapped: SharedMapping) -> Iterator[memoryview]:
    try:
        with mapped.view() as view:
            yield view
    finally:
        mapped.close()
        os.close(fd)


@needs_huge_pages
@pytest.mark.parametrize("sealed", [False, True])
def test_the_pages_of_an_extent_are_huge(sealed: bool) -> None:
    fd, mapped = make_touched_extent(NBYTES, frozenset(), sealed=sealed)
    with opened(fd, mapped):
        assert huge_nbytes(fd, NBYTES) >= NBYTES // 2  # memory may be in pieces
        assert present_nbytes(fd) == NBYTES


@needs_huge_pages
def test_the_rest_of_an_odd_extent_stays_small() -> None:
    nbytes = NBYTES + 3 * mmap.PAGESIZE
    fd, mapped = make_touched_extent(nbytes, frozenset())
    with opened(fd, mapped) as view:
        assert present_nbytes(fd) == nbytes
        assert len(view) == nbytes
        view[-1] = 7
        assert view[-1] == 7


@needs_huge_pages
def test_the_pages_are_huge_in_the_mapping_that_is_used() -> None:
    fd, mapped = make_touched_extent(NBYTES, frozenset())
    with opened(fd, mapped) as view:
        assert mapped_huge_nbytes(ctypes.addressof(ctypes.c_char.from_buffer(view))) >= NBYTES // 2


@needs_huge_pages
def test_the_first_extent_is_made_huge_where_it_is_mapped() -> None:
    async def work() -> int:
        arena = Arena(NBYTES, NBYTES)
        await arena.start()
        try:
            await arena.growth._touching
            (extent,) = arena.extents
            address = ctypes.addressof(ctypes.c_char.from_buffer(extent.view))
            return mapped_huge_nbytes(address)
        finally:
            await arena.close()

    assert asyncio.run(work()) >= NBYTES // 2


def test_an_extent_below_a_huge_page_has_none() -> None:
    fd, mapped = make_extent(HUGE_NBYTES // 2, frozenset())
    with opened(fd, mapped):
        assert not collapse(mapped)


@needs_huge_pages
def test_what_is_written_meanwhile_stays() -> None:
    for _ in range(20):
        fd, mapped = make_extent(NBYTES, frozenset())
        with opened(fd, mapped) as view:
            thread = threading.Thread(target=touch, args=(mapped,))
            thread.start()
            number = 0
            while thread.is_alive() or not number:
                number = number % 251 + 1
                for at in range(0, NBYTES, mmap.PAGESIZE):
                    view[at] = number
                assert all(view[at] == number for at in range(0, NBYTES, mmap.PAGESIZE))
            thread.join()
            assert all(view[at] == number for at in range(0, NBYTES, mmap.PAGESIZE))


@needs_huge_pages
def test_a_hole_in_a_huge_page_that_is_held_is_made_when_it_is_free() -> None:
    fd, mapped = make_touched_extent(NBYTES, frozenset())
    with opened(fd, mapped) as view:
        reader = held(view)
        run = (HUGE_NBYTES // 2, HUGE_NBYTES // 2 + (64 << 10))
        thread = threading.Thread(target=punch, args=(fd, [run], threading.Lock()))
        thread.start()
        time.sleep(0.05)
        os.close(reader)
        thread.join()
        assert present_nbytes(fd) == NBYTES - (64 << 10)


def held(view: memoryview) -> int:
    """Have a pipe hold the first page, as a transfer does; return its end, to be closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    anchor = ctypes.c_char.from_buffer(view)
    part = (ctypes.c_size_t * 2)(ctypes.addressof(anchor), mmap.PAGESIZE)
    assert libc.vmsplice(writer, part, 1, 0) == mmap.PAGESIZE
    os.close(writer)
    return reader


@needs_huge_pages
def test_an_arena_that_closes_at_once_leaves_no_descriptor() -> None:
    async def opened_and_closed() -> None:
        arena = Arena(NBYTES, NBYTES)
        await arena.start()
        await arena.close()

    asyncio.run(opened_and_closed())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        asyncio.run(opened_and_closed())
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
