"""Where the values of a block lie in an engine's memory, and how that is cut into tiles.

A codec has to know which axis is tokens and which channels: a wrong one costs all of the gain,
never correctness. A *place* is the keys or the values (or a latent) of one layer. A *tile* is T
tokens of one head of one place; T is all of a block's, or a part of at most 64.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_kernels.codec.record import HEADER_NBYTES, DType

TOKENS_MAX = 64
CHANNELS_MAX = 1024
GROUP_CHANNELS = 64
TILE = np.dtype(
    [
        ("first", "<i8"),
        ("token", "<i8"),
        ("token_far", "<i8"),
        ("channel", "<i8"),
        ("channel_far", "<i8"),
        ("layer", "<u4"),
        ("tokens", "<u2"),
        ("channels", "<u2"),
        ("token_run", "<u2"),
        ("channel_run", "<u2"),
        ("kind", "<u2"),
        ("unused", "<u2", (5,)),
    ]
)
"""A tile as the native library reads it (native/plan.h), distances in bytes."""
KINDS = {"K": 0, "V": 1, "latent": 1, "rope": 0}
"""What is coded as keys (0) and as values (1): of MLA, the rotary part and the latent."""


class Unplaced(ValueError):
    """This memory cannot be described to the codec; its records are stored raw."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a place, in elements: index i lies at i // run * far + i % run * near.

    run 0: the axis is even, so near alone counts.
    """

    count: int
    near: int
    run: int = 0
    far: int = 0

    def at(self, index: int) -> int:
        """Return the distance of `index` from the axis's first element."""
        if not self.run:
            return index * self.near
        return index // self.run * self.far + index % self.run * self.near

    @property
    def text(self) -> list[int]:
        """What the canonical text says of the axis."""
        return [self.near] if not self.run else [self.run, self.near, self.far]


@dataclass(frozen=True, slots=True)
class Place:
    """Keys or values of one layer in one block: (heads, tokens, channels) from element `first`.

    kind: "K", "V", "latent" or "rope".
    """

    kind: str
    heads: Axis
    tokens: Axis
    channels: Axis
    first: int = 0

    @property
    def text(self) -> list[object]:
        """What the canonical text says of the place."""
        axes = (self.heads, self.tokens, self.channels)
        counts = [axis.count for axis in axes]
        return [self.kind, *counts, [axis.text for axis in axes], self.first]


class Shape:
    """The values of one record: places by layer, and the tiles they are cut into.

    Everything here follows from the places and the dtype, so two processes that describe their
    memory alike have equal shapes, and `digest` tells whether they do.
    """

    def __init__(self, layers: Sequence[Sequence[Place]], dtype: DType) -> None:
        """Raise Unplaced for what the codec does not take."""
        if not layers or not all(layers):
            raise Unplaced("every layer has at least one place")
        if dtype is DType.FP8:
            raise Unplaced("float8 caches are stored raw")
        self.dtype = dtype
        for place in (place for places in layers for place in places):
            _check(place)
        tokens = {place.tokens.count for places in layers for place in places}
        if len(tokens) != 1:
            raise Unplaced(f"a block has one number of tokens, not {sorted(tokens)}")
        (self.tokens,) = tokens
        text = [[place.text for place in places] for places in layers]
        self.text = json.dumps([dtype.name, text], separators=(",", ":"))
        self.digest = int(xxhash.xxh3_64_intdigest(self.text.encode()))
        self.tiles = tiles_of(layers, dtype)
        self._values = self.tiles["tokens"].astype(np.int64) * self.tiles["channels"]

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the values in the engine's memory."""
        return int(self._values.sum()) * self.dtype.nbytes

    @property
    def record_nbytes(self) -> int:
        """The most a record of this shape has: raw values behind a header."""
        return HEADER_NBYTES + self.raw_nbytes

    @cached_property
    def groups(self) -> int:
        """How many groups of channels L3 has, of all tiles."""
        return int((-(-self.tiles["channels"].astype(np.int64) // GROUP_CHANNELS)).sum())

    @cached_property
    def l3_tiles(self) -> npt.NDArray[np.int64]:
        """Bytes of each tile in L3, without its escapes."""
        values, channels = self._values, self.tiles["channels"].astype(np.int64)
        low_halves = values * 2 if self.dtype is DType.FP32 else 0
        return _whole(values + channels // 2 + values // 8 * 3 + low_halves)

    @property
    def l3_body_at(self) -> int:
        """Where L3's first tile begins: behind the group table."""
        return HEADER_NBYTES + -(-self.groups * 4 // 16) * 16

    @property
    def l3_tail_at(self) -> int:
        """Where L3's escapes begin."""
        return self.l3_body_at + int(self.l3_tiles.sum())

    def ep_nbytes(self, planes: tuple[int, int], *, base: bool) -> int:
        """Bytes of an EP record with `planes` of (keys, values).

        base: with the stripes' minima and steps; else they are in the base part.
        """
        return HEADER_NBYTES + int(self.ep_tiles(planes, base=base).sum())

    def ep_tiles(self, planes: tuple[int, int], *, base: bool) -> npt.NDArray[np.int64]:
        """Bytes of each tile of an EP record."""
        tiles = self.tiles
        keys = tiles["kind"] == 0
        stripes = np.where(keys, tiles["channels"], tiles["tokens"]).astype(np.int64)
        each = np.where(keys, *planes)
        return _whole(self._values // 8 * each + (stripes * 3 if base else 0))


def _whole(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (nbytes + 15) // 16 * 16


def _check(place: Place) -> None:
    if place.kind not in KINDS:
        raise Unplaced(f"{place.kind!r} is none of {', '.join(KINDS)}")
    tokens, channels = place.tokens.count, place.channels.count
    if tokens % 8 or not 8 <= tokens < 1 << 16:
        raise Unplaced(f"blocks of {tokens} tokens: a multiple of 8 is needed")
    if channels % 16 or not 16 <= channels <= CHANNELS_MAX:
        raise Unplaced(f"{channels} channels: a multiple of 16 up to {CHANNELS_MAX} is needed")
    if place.heads.count < 1:
        raise Unplaced("a place has at least one head")
    if tokens % (place.tokens.run or tokens) or channels % (place.channels.run or channels):
        raise Unplaced("a run of tokens or channels divides their number")


def tile_tokens(tokens: int, run: int = 0) -> int:
    """Return how many of a block's tokens one tile has: all, or a divisor of at most 64.

    run: that many tokens lie evenly apart, 0 all; a tile has whole runs, or a part of one.
    """
    if tokens <= TOKENS_MAX:
        return tokens
    for size in range(TOKENS_MAX, 0, -8):
        if tokens % size == 0 and (not run or size % run == 0 or run % size == 0):
            return size
    raise Unplaced(f"blocks of {tokens} tokens in runs of {run}")


def tiles_of(layers: Sequence[Sequence[Place]], dtype: DType) -> npt.NDArray[np.void]:
    """Return the tiles of places by layer, as TILE, in the order of a record."""
    rows = [
        row
        for index, places in enumerate(layers)
        for place in places
        for row in _tiles(place, index, dtype.nbytes)
    ]
    return np.array(rows, TILE)


def _tiles(place: Place, layer: int, item: int) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a place: heads in order, in a head tokens."""
    tokens, channels = place.tokens, place.channels
    size = tile_tokens(tokens.count, tokens.run)
    for head in range(place.heads.count):
        for begin in range(0, tokens.count, size):
            yield (
                (place.first + place.heads.at(head) + tokens.at(begin)) * item,
                tokens.near * item,
                tokens.far * item,
                channels.near * item,
                channels.far * item,
                layer,
                size,
                channels.count,
                min(tokens.run or size, size),
                channels.run or channels.count,
                KINDS[place.kind],
                (0,) * 5,
            )
