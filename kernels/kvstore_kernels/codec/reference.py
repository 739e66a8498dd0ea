"""Every form, slowly and exactly, in numpy: what C++ and CUDA have to equal byte for byte.

Tiles are arrays (T, D): uint16 for 16-bit values, uint32 for float32. All arithmetic of EP is
float32, rounded to nearest even. The rotation of values (signs and butterflies, a randomized
Hadamard transform) is QuaRot's; the stripes are KIVI's: keys by channel, values by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_kernels.codec.places import GROUP_CHANNELS, Shape
from kvstore_kernels.codec.record import BadRecord, DType, Form, Header

Bits: TypeAlias = npt.NDArray[np.unsignedinteger]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
_ESCAPE = 7
_BELOW_MAX = 15
_STEP_BIAS = 824
_LARGEST = np.float32(65504)


# Tiles in and out of memory ----------------------------------------------------------------------


def gather(shape: Shape, pages: Sequence[Bytes]) -> list[Bits]:
    """Return the tiles of one block. pages: each layer's memory from the block's begin on."""
    return [pages[tile["layer"]].view(_bits(shape))[_at(shape, tile)] for tile in shape.tiles]


def scatter(shape: Shape, tiles: Sequence[Bits], pages: Sequence[Bytes]) -> None:
    """Write the tiles of one block to where `gather` reads them."""
    for tile, values in zip(shape.tiles, tiles, strict=True):
        pages[tile["layer"]].view(_bits(shape))[_at(shape, tile)] = values


def _bits(shape: Shape) -> type[np.unsignedinteger]:
    return np.uint32 if shape.dtype is DType.FP32 else np.uint16


def _at(shape: Shape, tile: np.void) -> npt.NDArray[np.int64]:
    t, c = np.arange(tile["tokens"]), np.arange(tile["channels"])
    tokens = t // tile["token_run"] * tile["token_far"] + t % tile["token_run"] * tile["token"]
    channels = (
        c // tile["channel_run"] * tile["channel_far"] + c % tile["channel_run"] * tile["channel"]
    )
    at: npt.NDArray[np.int64] = tile["first"] + tokens[:, None] + channels[None, :]
    return at // shape.dtype.nbytes


# Planes ------------------------------------------------------------------------------------------


def _planes(codes: Bits, which: Sequence[int]) -> bytes:
    """Return bits `which` of codes (T, D): each [T/8][D] bytes, bit i of token 8j + i."""
    by_eight = codes.reshape(len(codes) // 8, 8, -1)
    return b"".join(
        np.packbits((by_eight >> bit) & 1, axis=1, bitorder="little")[:, 0].tobytes()
        for bit in which
    )


def _codes(planes: Bytes, tokens: int, channels: int, which: Sequence[int]) -> Bits:
    rows = planes.reshape(len(which), tokens // 8, 1, channels)
    bits = np.unpackbits(rows, axis=2, bitorder="little").reshape(len(which), tokens, channels)
    codes = np.zeros((tokens, channels), np.uint8)
    for bit, plane in zip(which, bits, strict=True):
        codes |= plane << np.uint8(bit)
    return codes


# L3 ----------------------------------------------------------------------------------------------


def l3_encode(shape: Shape, tiles: Sequence[Bits]) -> bytes:
    """Return the L3 record of one block, however long."""
    if shape.dtype is DType.FP16:
        raise ValueError("float16 has too few bits of exponent for L3")
    table, body, tail = [], [], []
    for values in tiles:
        halves = (values >> 16).astype(np.uint16) if shape.dtype is DType.FP32 else values
        fixed, groups, escapes = _l3_tile(halves)
        if shape.dtype is DType.FP32:
            fixed += values.astype(np.uint16).tobytes()
        body.append(_filled(fixed))
        table += groups
        tail.append(escapes)
    header = Header(
        form=Form.L3,
        dtype=shape.dtype,
        tokens=shape.tokens,
        tiles=len(tiles),
        shape=shape.digest,
        tail_at=shape.l3_tail_at,
        nbytes=shape.l3_tail_at + sum(map(len, tail)),
    )
    return header.pack() + _filled(np.array(table, "<u4").tobytes()) + b"".join(body + tail)


def _l3_tile(x: Bits) -> tuple[bytes, list[int], bytes]:
    exponent, rest = (x >> 7) & 255, (x >> 8) & 128 | x & 127
    nibbles, groups, escapes = [], [], []
    distance = np.zeros_like(exponent)
    for begin in range(0, x.shape[1], GROUP_CHANNELS):
        part = exponent[:, begin : begin + GROUP_CHANNELS]
        top = int(part.max())
        below = np.minimum(top - part.max(0), _BELOW_MAX)
        mine = top - below - part
        distance[:, begin : begin + GROUP_CHANNELS] = mine
        half = len(below) // 2
        nibbles.append((below[:half] | below[half:] << 4).astype(np.uint8).tobytes())
        far = mine[mine >= _ESCAPE]
        groups.append(len(far) | top << 16)
        escapes.append(far.astype(np.uint8).tobytes())
    planes = _planes(np.minimum(distance, _ESCAPE), (0, 1, 2))
    return rest.astype(np.uint8).tobytes() + b"".join(nibbles) + planes, groups, b"".join(escapes)


def l3_decode(shape: Shape, record: bytes) -> list[Bits]:
    """Return the tiles of an L3 record. Raises BadRecord if its escapes do not add up."""
    header = Header.parse(record)
    data = np.frombuffer(record, np.uint8, header.nbytes)
    table = data[64 : 64 + 4 * shape.groups].view("<u4")
    tail, at = data[shape.l3_tail_at :], shape.l3_body_at
    tiles: list[Bits] = []
    for tile, nbytes in zip(shape.tiles, shape.l3_tiles, strict=True):
        tokens, channels = int(tile["tokens"]), int(tile["channels"])
        count = -(-channels // GROUP_CHANNELS)
        halves, used = _l3_values(data[at : at + nbytes], tokens, channels, table[:count], tail)
        if shape.dtype is DType.FP32:
            begin = at + tokens * channels * 11 // 8 + channels // 2
            low = data[begin : begin + tokens * channels * 2].view("<u2").reshape(tokens, channels)
            tiles.append(halves.astype(np.uint32) << 16 | low)
        else:
            tiles.append(halves)
        table, tail, at = table[count:], tail[used:], at + int(nbytes)
    if len(tail):
        raise BadRecord(f"{len(tail)} escapes too many")
    return tiles


def _l3_values(
    data: Bytes, tokens: int, channels: int, table: Bits, tail: Bytes
) -> tuple[Bits, int]:
    values = tokens * channels
    rest = data[:values].reshape(tokens, channels).astype(np.uint16)
    nibbles, planes = data[values : values + channels // 2], data[values + channels // 2 :]
    distance = _codes(planes[: values // 8 * 3], tokens, channels, (0, 1, 2))
    exponent, used = np.zeros((tokens, channels), np.uint8), 0
    for index, entry in enumerate(table):
        cut = slice(index * GROUP_CHANNELS, min((index + 1) * GROUP_CHANNELS, channels))
        packed = nibbles[cut.start // 2 : cut.stop // 2]
        mine, count = distance[:, cut], int(entry) & 0xFFFF
        far = mine == _ESCAPE
        if int(far.sum()) != count or used + count > len(tail):
            raise BadRecord("the escapes do not add up")
        mine[far] = tail[used : used + count]
        used += count
        below = np.concatenate([packed & 15, packed >> 4])
        exponent[:, cut] = np.uint8(int(entry) >> 16 & 255) - below - mine
    wide = exponent.astype(np.uint16)
    return ((rest & 128) << 8 | wide << 7 | rest & 127).astype(np.uint16), used


# EP ----------------------------------------------------------------------------------------------


def ep_encode(
    shape: Shape, tiles: Sequence[Bits], planes: tuple[int, int], fine: tuple[int, int]
) -> tuple[bytes, bytes] | None:
    """Return the base and fine records of one block; the fine one names no pair yet.

    planes, fine: of (keys, values) in each. None: a value is infinite, NaN or above 65504, or a
    stripe is wider than a half and 8 bits of a step can tell.
    """
    bodies: tuple[list[bytes], list[bytes]] = ([], [])
    for tile, values in zip(shape.tiles, tiles, strict=True):
        x, kind = to_float(values, shape.dtype), int(tile["kind"])
        if not (np.abs(x) <= _LARGEST).all():
            return None
        coded = (_encode_values if kind else _encode_keys)(x)
        if coded is None:
            return None
        lows, steps, codes = coded
        cut = 8 - planes[kind]
        bodies[0].append(_filled(lows + steps + _planes(codes, range(7, cut - 1, -1))))
        bodies[1].append(_filled(_planes(codes, range(cut - 1, cut - 1 - fine[kind], -1))))
    forms = ((Form.EP_BASE, planes, (0, 0)), (Form.EP_FINE, fine, planes))
    base, more = (
        Header(
            form=form,
            dtype=shape.dtype,
            tokens=shape.tokens,
            tiles=len(tiles),
            shape=shape.digest,
            planes=count,
            before=before,
            nbytes=64 + sum(map(len, body)),
        ).pack()
        + b"".join(body)
        for (form, count, before), body in zip(forms, bodies, strict=True)
    )
    return base, more


def ep_decode(shape: Shape, base: bytes, fine: bytes | None = None) -> list[Bits]:
    """Return the tiles of a base record, with its fine record's planes if there is one."""
    planes = Header.parse(base).planes
    more = Header.parse(fine).planes if fine is not None else (0, 0)
    data = np.frombuffer(base, np.uint8)[64:]
    rest = np.frombuffer(fine, np.uint8)[64:] if fine is not None else data[:0]
    tiles: list[Bits] = []
    for tile, nbytes, extra in zip(
        shape.tiles,
        shape.ep_tiles(planes, base=True),
        shape.ep_tiles(more, base=False),
        strict=True,
    ):
        tokens, channels, kind = int(tile["tokens"]), int(tile["channels"]), int(tile["kind"])
        stripes = tokens if kind else channels
        lows, steps = data[: 2 * stripes].view("<u2"), data[2 * stripes : 3 * stripes]
        known, size = planes[kind] + more[kind], tokens * channels // 8
        packed = np.concatenate(
            [data[3 * stripes :][: size * planes[kind]], rest[: size * more[kind]]]
        )
        codes = _codes(packed, tokens, channels, range(7, 7 - known, -1))
        half = np.float32(((1 << (8 - known)) - 1) * 0.5)
        x = _decode_values if kind else _decode_keys
        tiles.append(of_float(x(codes, half, lows, steps), shape.dtype))
        data, rest = data[nbytes:], rest[extra:]
    return tiles


def _encode_keys(x: Floats) -> tuple[bytes, bytes, Bits] | None:
    low = _floor10(x.min(0))
    index = _step_index(low, x.max(0))
    if index is None:
        return None
    return _half(low).tobytes(), index.tobytes(), _code(x, low, index)


def _encode_values(x: Floats) -> tuple[bytes, bytes, Bits] | None:
    x = _rotate(x * _signs(x.shape[1]))
    low = _floor10(x.min(1))
    index = _step_index(low, x.max(1))
    if index is None:
        return None
    return _half(low).tobytes(), index.tobytes(), _code(x, low[:, None], index[:, None])


def _decode_keys(codes: Bits, half: np.float32, lows: Bits, steps: Bits) -> Floats:
    return _value(codes, half, _of_half(lows), _step(steps))


def _decode_values(codes: Bits, half: np.float32, lows: Bits, steps: Bits) -> Floats:
    x = _value(codes, half, _of_half(lows)[:, None], _step(steps)[:, None])
    x = _rotate(x)
    x *= _signs(codes.shape[1])
    return x


def _rotate(x: Floats) -> Floats:
    """Butterflies over blocks of the largest power of two that divides D, and their norm."""
    tokens, channels = x.shape
    block = channels & -channels
    stride = 1
    while stride < block:
        pairs = x.reshape(tokens, channels // (2 * stride), 2, stride)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([first + second, first - second], 2).reshape(tokens, channels)
        stride *= 2
    norm = np.float32(1) / np.sqrt(np.float32(block))
    normed: Floats = x * norm
    return normed


@cache
def _signs(channels: int) -> Floats:
    return (1 - 2 * (splitmix64(channels) & np.uint64(1)).astype(np.int64)).astype(np.float32)


def splitmix64(count: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    """Return the first `count` outputs of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _floor10(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    down = (bits + np.where(x < 0, 0x1FFF, 0).astype(np.uint32)) & np.uint32(0xFFFFE000)
    lower: Floats = down.view(np.float32)
    lower += np.float32(0)  # no negative zero
    return lower


def _half(x: Floats) -> Bits:
    bits = x.view(np.uint32)
    size = np.maximum((bits >> 13 & 0x3FFFF).astype(np.int64) - (112 << 10), 0)
    half: Bits = (size | (bits >> 16 & 0x8000)).astype(np.uint16)
    return half


def _of_half(half: Bits) -> Floats:
    wide = half.astype(np.uint32)
    size = wide & 0x7FFF
    bits = np.where(size, (size << 13) + np.uint32(112 << 23), 0).astype(np.uint32)
    return (bits | (wide & 0x8000) << 16).astype(np.uint32).view(np.float32)


def _step_index(low: Floats, high: Floats) -> Bits | None:
    """Return the steps as stored; None if 8 bits do not hold one, or a half not the lowest value:
    rotated values may be larger than any that came."""
    width = high - low + np.float32(0)  # of zeros either may be negative
    step = (width * (np.float32(1) / np.float32(255))).astype(np.float32)
    index = ((step.view(np.uint32) + np.uint32(0xFFFFF)) >> 20).astype(np.int64) - _STEP_BIAS
    if (index > 255).any() or (low < -_LARGEST).any():
        return None
    return np.maximum(index, 0).astype(np.uint8)


def _step(index: Bits) -> Floats:
    return ((index.astype(np.uint32) + np.uint32(_STEP_BIAS)) << 20).view(np.float32)


def _code(x: Floats, low: Floats, index: Bits) -> Bits:
    scaled = ((x - low) * (np.float32(1) / _step(index))).astype(np.float32)
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def _value(codes: Bits, half: np.float32, low: Floats, step: Floats) -> Floats:
    scaled = (codes.astype(np.float32) + half) * step
    return (scaled + low).astype(np.float32)


def to_float(bits: Bits, dtype: DType) -> Floats:
    """Return float32 of the engine's values; exact."""
    if dtype is DType.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype is DType.FP16:
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return bits.astype(np.uint32).view(np.float32)


def of_float(x: Floats, dtype: DType) -> Bits:
    """Round float32 to the engine's values, to nearest even; float16 stays finite."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype is DType.FP16:
        return np.clip(x, -_LARGEST, _LARGEST).astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    if dtype is DType.FP32:
        return bits
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _filled(part: bytes) -> bytes:
    return part + bytes(-len(part) % 16)
