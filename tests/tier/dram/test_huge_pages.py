"""The arena's pages are huge where the kernel makes them so, and what lies in them stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.tier.dram import makes_huge_pages
from kvstore.tier.dram.extent_memory import (
    HUGE_NBYTES,
    collapse,
    make_extent,
    make_touched_extent,
    present_nbytes,
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
        with open("/proc/self/smaps", encoding="ascii") as file:
            ours = file.read().split(f"{first:x}-", 1)[1]
        found = re.search(r"ShmemPmdMapped: *([0-9]+) kB", ours)
        assert found is not None
        return int(found[1]) << 10
    finally:
        libc.munmap(begin, room)


@contextmanager
def opened(fd: int, mapped: mmap.mmap) -> Iterator[mmap.mmap]:
    try:
        yield mapped
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
    with opened(fd, mapped):
        assert present_nbytes(fd) == nbytes
        assert len(mapped) == nbytes
        mapped[-1] = 7
        assert mapped[-1] == 7


def test_an_extent_below_a_huge_page_has_none() -> None:
    fd, mapped = make_extent(HUGE_NBYTES // 2, frozenset())
    with opened(fd, mapped):
        assert not collapse(fd, HUGE_NBYTES // 2)


@needs_huge_pages
def test_what_is_written_meanwhile_stays() -> None:
    fd, mapped = make_extent(NBYTES, frozenset())
    with opened(fd, mapped):
        stop = threading.Event()
        written = 0

        def write() -> None:
            nonlocal written
            while not stop.is_set():
                for at in range(0, NBYTES, mmap.PAGESIZE):
                    mapped[at] = written % 251 + 1
                written += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(5):
                touch(fd, mapped)
        finally:
            stop.set()
            thread.join()
        expected = (written - 1) % 251 + 1
        assert all(mapped[at] == expected for at in range(0, NBYTES, mmap.PAGESIZE))
