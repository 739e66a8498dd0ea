"""The state of a sequence: cut into blocks, joined again, and never read in a way it was not
written."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_llamacpp.state import (
    Blocks,
    CacheLayout,
    Tensor,
    UnknownState,
    read_state,
    state_nbytes,
    write_state,
)

ROWS = Tensor(1, 8)
CHANNELS = Tensor(1, 2, 4)
PLAIN = CacheLayout(3, False, (ROWS,) * 6)
TRANSPOSED = CacheLayout(2, True, (ROWS, ROWS, CHANNELS, CHANNELS))
QUANTIZED = CacheLayout(2, False, (Tensor(8, 34), Tensor(8, 34), Tensor(2, 18), Tensor(2, 18)))
LATENT = CacheLayout(3, False, (Tensor(1, 24),) * 3)
EMPTY = CacheLayout(0, False, ())
TOKENS = 4


def blocks(layout: CacheLayout, count: int, first: int = 0) -> Blocks:
    random = np.random.default_rng(count)
    shape = count, TOKENS * layout.cell_nbytes
    return Blocks(layout, first, TOKENS, random.integers(0, 256, shape, dtype=np.uint8))


def written(*caches: Blocks) -> np.ndarray:
    state = np.empty(state_nbytes(caches), np.uint8)
    write_state(caches, state)
    return state


@pytest.mark.parametrize("layout", [PLAIN, TRANSPOSED, QUANTIZED, LATENT])
def test_blocks_come_back_from_a_state(layout: CacheLayout) -> None:
    before = blocks(layout, 5)
    [found] = read_state(written(before), (1, 2))
    assert (found.layout, found.first, found.end) == (layout, 0, 20)
    for index, record in enumerate(before.records):
        after = np.empty_like(record)
        found.copy_block(index * TOKENS, TOKENS, after)
        assert (after == record).all()


@pytest.mark.parametrize("full", [PLAIN, EMPTY])
def test_a_window_is_a_second_cache_with_its_own_cells(full: CacheLayout) -> None:
    window = blocks(TRANSPOSED, 2, first=12)
    states = read_state(written(blocks(full, 5), window), (1, 2))
    assert [each.layout for each in states] == [full, TRANSPOSED]
    assert (states[1].first, states[1].end) == (12, 20)
    record = np.empty_like(window.records[1])
    states[1].copy_block(16, TOKENS, record)
    assert (record == window.records[1]).all()


def test_blocks_that_do_not_begin_where_the_state_does() -> None:
    before = blocks(TRANSPOSED, 4)
    [found] = read_state(written(before), (1,))
    record = np.empty(TOKENS * TRANSPOSED.cell_nbytes, np.uint8)
    found.copy_block(2, TOKENS, record)
    again = np.empty_like(record)
    [shifted] = read_state(written(Blocks(TRANSPOSED, 2, TOKENS, record[None])), (1,))
    shifted.copy_block(2, TOKENS, again)
    assert (again == record).all()


def test_cells_in_another_order_than_their_tokens() -> None:
    before = blocks(PLAIN, 1)
    state = written(before)
    order = [2, 0, 3, 1]
    swapped = state.copy()
    cells = 8 + 8
    at = [cells + 12 * index for index in range(TOKENS)]
    for to, index in enumerate(order):
        swapped[at[to] : at[to] + 12] = state[at[index] : at[index] + 12]
    data = cells + 12 * TOKENS + 8
    for tensor in range(6):
        begin = data + tensor * (12 + 32) + 12
        rows = state[begin : begin + 32].reshape(TOKENS, 8)
        swapped[begin : begin + 32] = rows[order].ravel()
    [found] = read_state(swapped, (1,))
    record = np.empty_like(before.records[0])
    found.copy_block(0, TOKENS, record)
    assert (record == before.records[0]).all()


def damaged(at: int, form: str, *values: int) -> np.ndarray:
    state = written(blocks(PLAIN, 2))
    struct.pack_into(form, state.data, at, *values)
    return state


CELL = 16  # the first cell
DATA = CELL + 12 * 8


@pytest.mark.parametrize(
    "state",
    [
        np.zeros(0, np.uint8),
        np.zeros(64, np.uint8),
        written(blocks(PLAIN, 2))[:-1],
        np.concatenate([written(blocks(PLAIN, 2)), np.zeros(1, np.uint8)]),
        damaged(0, "=I", 1),
        damaged(4, "=i", 1),
        damaged(8, "=I", 2),
        damaged(12, "=I", 0),
        damaged(12, "=I", 0xFFFFFFFF),
        damaged(CELL, "=i", 5),
        damaged(CELL, "=i", -1),
        damaged(CELL + 4, "=I", 2),
        damaged(CELL + 8, "=i", 1),
        damaged(DATA, "=I", 2),
        damaged(DATA + 4, "=I", 0xFFFFFFFF),
        damaged(DATA + 8, "=i", -1),
        damaged(DATA + 12, "=Q", 1 << 60),
    ],
)
def test_a_state_that_is_not_known_is_not_read(state: np.ndarray) -> None:
    with pytest.raises(UnknownState):
        read_state(state, (1, 2))


@given(st.binary(max_size=400), st.integers(0, 300))
def test_no_bytes_are_read_in_another_way(tail: bytes, keep: int) -> None:
    state = np.concatenate([written(blocks(PLAIN, 2))[:keep], np.frombuffer(tail, np.uint8)])
    try:
        found = read_state(state, (1, 2))
    except UnknownState:
        return
    assert state_nbytes(
        [Blocks(each.layout, each.first, 1, each.data[: each.cells, None]) for each in found]
    ) == len(state)
