"""What llama.cpp writes as the state of one sequence: how it is cut by tokens, and joined again.

`llama_state_seq_get_data` writes, in the machine's byte order:

    u32 magic, i32 sequence, then each KV cache of the context:
    u32 streams (1), u32 cells
    for each cell: i32 position, u32 sequences (1), i32 sequence
    u32 whether V is transposed, u32 layers
    for each layer: i32 type, u64 bytes of K of one cell, then K of all cells
    for each layer: i32 type, u64 bytes of V of one cell, then V of all cells
    or, V transposed: i32 type, u32 bytes of an element, u32 channels, then by channel all cells

So the KV of consecutive tokens is one slice of each layer's bytes. A model with a sliding window
has two caches: that of the layers with full attention, and that of the window, of which only the
cells inside the window are written. A model without V (latent attention) has no part for V.

There is no length and no version in it. So a state counts as known only if exactly one reading of
it uses all its bytes, and every count in it is plausible; anything else has an unknown layout.

Source: `llama_kv_cache::state_write` of llama.cpp (src/llama-kv-cache.cpp, October 2026).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FORM = "llama.cpp sequence state 1"
MAGIC = 0xAF143CD8
SEQUENCE = 0
LAYERS_MAX = 4096
CELLS_MAX = 1 << 28
ROW_NBYTES_MAX = 1 << 26
TYPES_MAX = 1024
_HEAD = struct.Struct("=Ii")
_CACHE = struct.Struct("=II")
_CELL = np.dtype([("position", "=i4"), ("sequences", "=u4"), ("sequence", "=i4")])
_DATA = struct.Struct("=II")
_ROWS = struct.Struct("=iQ")
_CHANNELS = struct.Struct("=iII")


class UnknownState(Exception):
    """These bytes are not a state whose layout is known."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """K or V of one layer: `channels` runs of `nbytes` for each cell. 0 channels: not transposed,
    and `nbytes` are those of the whole cell. dtype: ggml's number of its type."""

    dtype: int
    nbytes: int
    channels: int = 0

    @property
    def cell_nbytes(self) -> int:
        return self.nbytes * (self.channels or 1)

    def head(self) -> bytes:
        """Return what stands before the tensor's cells."""
        if self.channels:
            return _CHANNELS.pack(self.dtype, self.nbytes, self.channels)
        return _ROWS.pack(self.dtype, self.nbytes)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One KV cache: its tensors in the order of the state, K of all layers, then V of all."""

    layers: int
    transposed: bool
    tensors: tuple[Tensor, ...]

    @property
    def cell_nbytes(self) -> int:
        """Bytes of one token, of all layers."""
        return sum(tensor.cell_nbytes for tensor in self.tensors)

    def describe(self) -> str:
        """Return text that differs if any byte of a record would mean something else."""
        tensors = " ".join(f"{t.dtype}:{t.nbytes}x{t.channels}" for t in self.tensors)
        return f"layers={self.layers} transposed={int(self.transposed)} {tensors}"


@dataclass(frozen=True, slots=True)
class CacheState:
    """One KV cache inside a state: cells of consecutive tokens, the first of which is `first`.

    places: where each tensor's cells begin in `data`. order: the cells by position, where the state
    has them in another order; None if it has not.
    """

    layout: CacheLayout
    first: int
    cells: int
    places: tuple[int, ...]
    data: Bytes
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self.cells

    def copy_block(self, begin: int, tokens: int, record: Bytes) -> None:
        """Write the KV of the tokens from position `begin` on into `record`, tensor by tensor.

        record: `tokens` * layout.cell_nbytes bytes. The tokens must be there.
        """
        at, wrote = begin - self.first, 0
        assert 0 <= at <= self.cells - tokens
        taken: Any = slice(at, at + tokens) if self.order is None else self.order[at : at + tokens]
        for tensor, place in zip(self.layout.tensors, self.places, strict=True):
            nbytes = tokens * tensor.cell_nbytes
            into = record[wrote : wrote + nbytes].reshape(tensor.channels or 1, tokens, -1)
            cells = self.data[place : place + self.cells * tensor.cell_nbytes]
            into[:] = cells.reshape(tensor.channels or 1, self.cells, -1)[:, taken]
            wrote += nbytes


def read_state(data: Bytes, caches: Sequence[int]) -> list[CacheState]:
    """Read a state of as many KV caches as one of `caches` says. Raises UnknownState."""
    if len(data) < _HEAD.size or _HEAD.unpack_from(data.data) != (MAGIC, SEQUENCE):
        raise UnknownState("it does not begin as a sequence's state")
    found: dict[tuple[CacheLayout, ...], list[CacheState]] = {}
    for count in caches:
        for with_values in product((True, False), repeat=count):
            try:
                states = _read(data, with_values)
            except (UnknownState, struct.error):
                continue
            found[tuple(state.layout for state in states)] = states
    if len(found) != 1:
        raise UnknownState(f"{len(found)} readings of it use all its {len(data)} bytes")
    return found.popitem()[1]


def _read(data: Bytes, with_values: Sequence[bool]) -> list[CacheState]:
    at, states = _HEAD.size, []
    for values in with_values:
        state, at = _read_cache(data, at, with_values=values)
        states.append(state)
    if at != len(data):
        raise UnknownState(f"{len(data) - at} bytes are left")
    return states


def _read_cache(data: Bytes, at: int, *, with_values: bool) -> tuple[CacheState, int]:
    streams, cells = _CACHE.unpack_from(data.data, at)
    at += _CACHE.size
    if streams != 1 or not 0 < cells <= CELLS_MAX:
        raise UnknownState(f"{streams} streams, {cells} cells")
    first, order = _positions(data[at : at + cells * _CELL.itemsize], cells)
    at += cells * _CELL.itemsize
    transposed, layers = _DATA.unpack_from(data.data, at)
    at += _DATA.size
    if transposed > 1 or layers > LAYERS_MAX:
        raise UnknownState(f"transposed={transposed}, {layers} layers")
    tensors: list[Tensor] = []
    places = []
    for number in range(layers * (1 + with_values)):
        tensor, at = _read_head(data, at, by_channel=bool(transposed) and number >= layers)
        tensors.append(tensor)
        places.append(at)
        at += cells * tensor.cell_nbytes
        if at > len(data):
            raise UnknownState("it ends inside a tensor")
    layout = CacheLayout(layers, bool(transposed), tuple(tensors))
    return CacheState(layout, first, cells, tuple(places), data, order), at


def _read_head(data: Bytes, at: int, *, by_channel: bool) -> tuple[Tensor, int]:
    if by_channel:
        dtype, nbytes, channels = _CHANNELS.unpack_from(data.data, at)
        at += _CHANNELS.size
        known = channels > 0
    else:
        (dtype, nbytes), channels = _ROWS.unpack_from(data.data, at), 0
        at += _ROWS.size
        known = True
    tensor = Tensor(dtype, nbytes, channels)
    if not (known and 0 <= dtype < TYPES_MAX and 0 < tensor.cell_nbytes <= ROW_NBYTES_MAX):
        raise UnknownState(f"a tensor of type {dtype}, {nbytes} bytes, {channels} channels")
    return tensor, at


def _positions(data: Bytes, cells: int) -> tuple[int, Any]:
    """Return the first position, and the cells' order unless they have that of their positions.

    Raises UnknownState if they are not consecutive tokens of one sequence.
    """
    if len(data) != cells * _CELL.itemsize:
        raise UnknownState("it ends inside the cells")
    found = data.view(_CELL) if data.flags.c_contiguous else data.copy().view(_CELL)
    if (found["sequences"] != 1).any() or (found["sequence"] != SEQUENCE).any():
        raise UnknownState("a cell is not of this sequence alone")
    positions = found["position"].astype(np.int64)
    order = None
    if (np.diff(positions) != 1).any():
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
    if positions[0] < 0 or (np.diff(positions) != 1).any():
        raise UnknownState("its cells are not of consecutive tokens")
    return int(positions[0]), order


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of one cache, the first of which begins at position `first`.

    records: (blocks, block_tokens * layout.cell_nbytes), as `copy_block` writes them.
    """

    layout: CacheLayout
    first: int
    block_tokens: int
    records: Bytes

    @property
    def cells(self) -> int:
        return len(self.records) * self.block_tokens


def state_nbytes(caches: Sequence[Blocks]) -> int:
    """Return the size of what `write_state` writes."""
    return _HEAD.size + sum(
        _CACHE.size
        + each.cells * (_CELL.itemsize + each.layout.cell_nbytes)
        + _DATA.size
        + sum(len(tensor.head()) for tensor in each.layout.tensors)
        for each in caches
    )


def write_state(caches: Sequence[Blocks], into: Bytes) -> None:
    """Write the state of a sequence that has these blocks. into: `state_nbytes` bytes."""
    at = 0

    def put(piece: bytes | Bytes) -> None:
        nonlocal at
        into[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)

    put(_HEAD.pack(MAGIC, SEQUENCE))
    for each in caches:
        put(_CACHE.pack(1, each.cells))
        cells = np.zeros(each.cells, _CELL)
        cells["position"] = np.arange(each.first, each.first + each.cells)
        cells["sequences"], cells["sequence"] = 1, SEQUENCE
        put(cells.view(np.uint8))
        put(_DATA.pack(each.layout.transposed, each.layout.layers))
        for tensor, part in zip(each.layout.tensors, _parts(each), strict=True):
            put(tensor.head())
            target = into[at : at + part.nbytes]
            target.reshape(part.shape)[...] = part
            at += part.nbytes
    assert at == len(into)


def _parts(blocks: Blocks) -> Iterator[Bytes]:
    """Yield each tensor's cells in the order of a state: (channels, blocks, bytes of a block)."""
    at = 0
    for tensor in blocks.layout.tensors:
        nbytes = blocks.block_tokens * tensor.cell_nbytes
        part = blocks.records[:, at : at + nbytes]
        yield part.reshape(len(part), tensor.channels or 1, -1).transpose(1, 0, 2)
        at += nbytes
