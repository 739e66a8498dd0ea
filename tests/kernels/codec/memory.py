"""An engine's memory for codec tests: places of every kind, filled with made-up KV."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.model.checksum import checksum
from kvstore_kernels.codec.coder import Coder, Memory
from kvstore_kernels.codec.places import Axis, Place, Shape
from kvstore_kernels.codec.record import DType
from kvstore_kernels.codec.reference import Bits, gather, of_float, scatter
from kvstore_kernels.codec.reference import _signs as signs

Bytes = npt.NDArray[np.uint8]


def place(
    kind: str, heads: int, tokens: int, channels: int, *, first: int = 0, order: str = "htc"
) -> Place:
    """Return a place whose axes lie in memory in the order of the letters, the last one densest.

    "p": pairs of channels: (head, channel pair, token, 2). "a": as AMX wants them, keys like "p" in
    runs of 16 tokens, values by pairs of tokens: (head, 16 channels, token pair, channel, 2).
    """
    if order == "a" and kind == "V":
        return Place(
            kind,
            Axis(heads, tokens * channels),
            Axis(tokens, 1, run=2, far=32),
            Axis(channels, 2, run=16, far=16 * tokens),
            first,
        )
    if order == "a" and tokens % 16 == 0:
        return Place(
            kind,
            Axis(heads, tokens * channels),
            Axis(tokens, 2, run=16, far=16 * channels),
            Axis(channels, 1, run=2, far=32),
            first,
        )
    if order in ("p", "a"):
        return Place(
            kind,
            Axis(heads, tokens * channels),
            Axis(tokens, 2),
            Axis(channels, 1, run=2, far=2 * tokens),
            first,
        )
    counts = {"h": heads, "t": tokens, "c": channels}
    strides, step = {}, 1
    for letter in reversed(order):
        strides[letter], step = step, step * counts[letter]
    axes = (Axis(counts[letter], strides[letter]) for letter in "htc")
    return Place(kind, *axes, first)


def both(heads: int, tokens: int, channels: int, order: str = "htc") -> list[Place]:
    """Return the keys and values of one layer."""
    values = heads * tokens * channels
    return [
        place("K", heads, tokens, channels, order=order),
        place("V", heads, tokens, channels, first=values, order=order),
    ]


@dataclass
class Pages:
    """`blocks` blocks of one layer's places each, as bytes; what a Coder calls raw."""

    shape: Shape
    memory: list[Bytes]
    record_nbytes: int
    counted: list[int] = field(default_factory=list)

    def read(self, block: int, record: memoryview) -> None:
        record[:] = b"".join(page.tobytes() for page in self.of(block))

    def write(self, block: int, record: memoryview) -> None:
        at = 0
        for page in self.of(block):
            page[:] = np.frombuffer(record[at : at + len(page)], np.uint8)
            at += len(page)

    def of(self, block: int) -> list[Bytes]:
        return [layer[block] for layer in self.memory]

    def fill(self, block: int, tiles: list[Bits]) -> None:
        scatter(self.shape, tiles, self.of(block))

    def tiles(self, block: int) -> list[Bits]:
        return gather(self.shape, self.of(block))

    def coder(self) -> Coder:
        layers = [Memory(each.ctypes.data, each.strides[0]) for each in self.memory]
        return Coder(self.shape, layers, self, checksum)

    def room(self, count: int) -> Bytes:
        return np.full(count * self.coder().room_nbytes(lossy=True), 0xAA, np.uint8)


def pages(layers: list[list[Place]], dtype: DType, blocks: int = 3) -> Pages:
    shape = Shape(layers, dtype)
    sizes = [
        sum(each.heads.count * each.tokens.count * each.channels.count for each in places)
        * dtype.nbytes
        for places in layers
    ]
    memory = [np.zeros((blocks, size), np.uint8) for size in sizes]
    return Pages(shape, memory, sum(sizes))


def made_up(shape: Shape, seed: int) -> list[Bits]:
    """Values as of a model: channels of several sizes, a few of them large."""
    rng = np.random.default_rng(seed)
    tiles = []
    for tile in shape.tiles:
        channels = int(tile["channels"])
        scale = np.exp2(rng.normal(0, 1.5, channels)) * (1 + 30 * (np.arange(channels) % 16 == 3))
        x = rng.normal(0, 1, (int(tile["tokens"]), channels)) * scale
        tiles.append(of_float(x.astype(np.float32), shape.dtype))
    return tiles


def wide(kind: str, size: float, dtype: DType = DType.BF16, channels: int = 128) -> Pages:
    """Block 1 has a stripe of values of that size: of a key channel, or of a row that lies along
    the rotation, so that all of it comes into one value."""
    page = pages([[place(kind, 1, 16, channels)]], dtype)
    x = np.zeros((16, channels), np.float32)
    if kind == "K":
        x[:2, 0] = -size, size
    else:
        x[3] = -size * signs(channels)
    page.fill(1, [of_float(x, dtype)])
    return page
