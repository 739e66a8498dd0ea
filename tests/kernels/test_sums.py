"""Checksums and copies of the native library: those of the Python ones, for every size."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_kernels import native
from kvstore_kernels.host import HostPages
from kvstore_kernels.native import sums

pytestmark = [
    pytest.mark.skipif(bool(native.reason()), reason=native.reason()),
    pytest.mark.usefixtures("isa"),
]
MOST = 300_000
BYTES = np.random.default_rng(0).integers(0, 256, MOST + 64, np.uint8)


def leaves(data: memoryview) -> list[int]:
    step = sums.LEAF_NBYTES
    return [
        xxhash.xxh3_64_intdigest(data[start : start + step]) for start in range(0, len(data), step)
    ]


def checksum(data: memoryview) -> int:
    found = leaves(data)
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(found)}Q", *found))


SIZES = [*range(300), 511, 512, 513, 1023, 1024, 1025, *range(65_530, 65_543), 131_072, MOST]


@pytest.mark.parametrize("first", [0, 1, 31])
def test_records_of_every_length_of_xxh3s_branches_have_their_checksum(first: int) -> None:
    records = [memoryview(BYTES)[first : first + size] for size in SIZES]
    expected = [checksum(each) for each in records]
    assert sums.sums_of(records) == expected
    assert [sums.leaves_of(each) for each in records] == [leaves(each) for each in records]
    targets = [memoryview(bytearray(size)) for size in SIZES]
    assert sums.copies(records, targets) == expected
    assert targets == records


@given(st.integers(0, MOST), st.integers(0, 63), st.integers(0, 63))
def test_any_size_at_any_alignment_is_copied_and_has_its_checksum(
    size: int, first: int, to: int
) -> None:
    record = memoryview(BYTES)[first : first + size]
    room = np.full(size + 128, 0xAA, np.uint8)
    assert sums.copies([record], [room.data[to : to + size]]) == [checksum(record)]
    assert room[to : to + size].tobytes() == record.tobytes()
    assert set(room[:to].tolist() + room[to + size :].tolist()) <= {0xAA}


LARGE = 8 << 20  # copies of as much go past the caches


@given(st.integers(0, MOST), st.integers(0, 63), st.sampled_from([0, 1, 16, 32, 48, 63]))
@settings(deadline=None, max_examples=25)
def test_large_copies_are_what_small_ones_are(size: int, first: int, to: int) -> None:
    """Whatever widths of stores the targets' addresses allow."""
    records = [memoryview(BYTES)[first : first + size], memoryview(BYTES)[:MOST]]
    records += records[1:] * (LARGE // MOST)
    room = aligned(sum(map(len, records)) + 128 * len(records))
    targets, at = [], 0
    for record in records:
        at += -at % 64 + to
        targets.append(room[at : at + len(record)].data)
        at += len(record)
    room[:] = 0xAA
    assert sums.copies(records, targets) == [checksum(each) for each in records]
    assert targets == records
    for one, other in itertools.pairwise(targets):
        gap = slice(room_at(room, one) + len(one), room_at(room, other))
        assert set(room[gap].tolist()) <= {0xAA}


def test_a_source_that_changes_meanwhile_is_read_once() -> None:
    """The sum is that of the copy, whatever the source has before and after."""
    nbytes = 4 * sums.LEAF_NBYTES
    source = aligned(nbytes)
    targets = [memoryview(bytearray(nbytes)) for _ in range(40)]
    stop = threading.Event()

    def change() -> None:
        draw = np.random.default_rng(1)
        while not stop.is_set():
            source[:] = draw.integers(0, 256, nbytes, np.uint8)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        found: list[int] = []
        until = time.monotonic() + 60
        while len(set(found)) < 2:
            assert time.monotonic() < until
            found = sums.copies([source.data] * len(targets), targets)
            assert found == [checksum(each) for each in targets]
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_copies_of_any_sizes(threads: int) -> None:
    draw = np.random.default_rng(2)
    sizes = [0, *draw.integers(1, MOST, 60).tolist(), 0, 0, 5, sums.LEAF_NBYTES, 0]
    records = [memoryview(BYTES)[:size] for size in sizes]
    targets = [memoryview(bytearray(size)) for size in sizes]
    shared = sums.SharedCopies(records, targets)
    assert shared.nbytes == sum(sizes)
    running = [threading.Thread(target=shared.take_part) for _ in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert shared.checksums == [checksum(each) for each in records]
    assert targets == records
    shared.take_part()  # finds nothing left
    assert shared.checksums == [checksum(each) for each in records]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_shared_copies_of_nothing_are_over_at_once(sizes: list[int]) -> None:
    shared = sums.SharedCopies([b""] * len(sizes), [memoryview(bytearray())] * len(sizes))
    shared.take_part()
    assert shared.checksums == [checksum(memoryview(b""))] * len(sizes)


def aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory that begins where a line of the cache does."""
    room = np.empty(nbytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:nbytes]


def room_at(room: np.ndarray[Any, np.dtype[np.uint8]], view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data - room.ctypes.data)


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        sums.copies([bytes(10)], [memoryview(bytearray(9))])


def host_pages(blocks: int) -> tuple[list[torch.Tensor], HostPages]:
    """Layers with blocks of 40 KiB, one with gaps between its blocks."""
    apart = torch.zeros(blocks, 2, 40, 256, dtype=torch.bfloat16)[:, :1]
    layers = [torch.zeros(blocks, 2, 40, 256, dtype=torch.bfloat16), apart]
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    return layers, HostPages(layers)


def test_pages_are_copied_in_one_call_as_one_by_one() -> None:
    layers, pages = host_pages(8)
    blocks = [5, 0, 7]
    one_by_one = [bytearray(pages.record_nbytes) for _ in blocks]
    for block, record in zip(blocks, one_by_one, strict=True):
        pages.read(block, memoryview(record))
    records = [memoryview(bytearray(pages.record_nbytes)) for _ in blocks]
    found = pages.read_all(blocks, records, checksum)
    assert [bytes(each) for each in records] == [bytes(each) for each in one_by_one]
    assert found == [checksum(memoryview(each)) for each in one_by_one]
    others, targets = host_pages(8)
    was = [layer.clone() for layer in others]
    assert targets.write_all(blocks, records, checksum) == found
    for layer, source, before in zip(others, layers, was, strict=True):
        for block in range(8):
            assert torch.equal(layer[block], (source if block in blocks else before)[block])


@pytest.mark.parametrize("to_pages", [False, True])
def test_sums_are_of_what_was_copied_whoever_writes_to_records_meanwhile(to_pages: bool) -> None:
    _, pages = host_pages(8)
    blocks = list(range(8))
    records = [memoryview(aligned(pages.record_nbytes)) for _ in blocks]
    stop = threading.Event()

    def change() -> None:
        draw = np.random.default_rng(1)
        while not stop.is_set():
            records[int(draw.integers(len(blocks)))][:] = draw.bytes(pages.record_nbytes)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            copy = pages.write_all if to_pages else pages.read_all
            found = copy(blocks, records, checksum)
            there = [memoryview(bytearray(pages.record_nbytes)) for _ in blocks]
            pages.read_all(blocks, there, checksum)
            assert found == [checksum(each) for each in there]
    finally:
        stop.set()
        thread.join()


def test_pages_of_any_sizes_are_records_of_all_of_them() -> None:
    draw = np.random.default_rng(3)
    for _ in range(40):
        sizes = [int(size) for size in draw.integers(1, 200_000, int(draw.integers(1, 6)))]
        layers = [torch.from_numpy(draw.integers(0, 256, (3, 1, size), np.uint8)) for size in sizes]
        pages, expected = HostPages(layers), [layer[1].numpy().tobytes() for layer in layers]
        record = memoryview(bytearray(pages.record_nbytes))
        (found,) = pages._all([1], [record], to_pages=False)
        assert bytes(record) == b"".join(expected)
        assert found == checksum(record)
        for layer in layers:
            layer.zero_()
        assert pages._all([1], [record], to_pages=True) == [found]
        assert [layer[1].numpy().tobytes() for layer in layers] == expected
        assert not any(layer[block].any() for layer in layers for block in (0, 2))


def test_what_may_not_be_written_to_is_refused() -> None:
    _, pages = host_pages(8)
    fixed, source = memoryview(bytes(pages.record_nbytes)), bytes(pages.record_nbytes)
    for write in (
        lambda: sums.copies([source], [fixed]),
        lambda: sums.SharedCopies([source], [fixed]),
        lambda: pages.read_all([0] * 4, [fixed] * 4, checksum),
    ):
        with pytest.raises(ValueError, match="cannot be written to"):
            write()
    assert not any(fixed)


@pytest.mark.parametrize("block", [-1, 8])
def test_no_page_outside_a_layer_is_touched(block: int) -> None:
    _, pages = host_pages(8)
    records = [memoryview(bytearray(pages.record_nbytes)) for _ in range(4)]
    with pytest.raises(IndexError, match="no such block"):
        pages.write_all([0, 1, 2, block], records, checksum)
    with pytest.raises(ValueError, match="a record of these pages has"):
        pages.read_all([0, 1, 2, 3], [each[:-1] for each in records], checksum)


def test_another_thread_runs_while_records_are_summed_up() -> None:
    """The call is long; a thread that holds no lock counts on meanwhile."""
    records = [memoryview(BYTES)] * 3000
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        starts, sizes = sums.addresses_of(records)
        found = np.empty(len(records), np.uint64)
        library = native.library()
        assert library is not None
        before = counted[0]
        library.kvstore_copies(
            len(records), starts.ctypes.data, None, sizes.ctypes.data, found.ctypes.data
        )
        assert counted[0] > before
    finally:
        stop.set()
        thread.join()
