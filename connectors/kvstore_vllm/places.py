"""Where vLLM's CPU back ends put values inside a block: found out by asking them to.

They pack keys for the instruction set, in ways that differ by processor, head size and block size.
So the engine's own function writes marks (the number of the head, the token and the channel) into
a scratch block, and where they land is read back. If that is a table of strides, records can be
coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_vllm.packings import Packing

DTYPES = {
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float32: DType.FP32,
}
_MARKS = 128  # every dtype holds the numbers below it, and one more
_Ints = npt.NDArray[np.int64]


def shape_of(layers: Sequence[torch.Tensor], packings: Sequence[Packing]) -> Shape:
    """Return the shape of a record of `layers` in host memory: each (B, H, N, 2D), or (B, 1, N, C)
    of latent attention.

    packings: how the back end packs each layer. Raises Unplaced, saying why, where it is not known.
    """
    dtype = dtype_of(layers)
    known: dict[tuple[Any, ...], list[Place]] = {}
    places = []
    for layer, packing in zip(layers, packings, strict=True):
        kind = (packing, layer.shape[1:], layer.stride()[1:])
        if kind not in known:
            known[kind] = _places(layer, packing)
        places.append(known[kind])
    return Shape(places, dtype)


def dtype_of(layers: Sequence[torch.Tensor]) -> DType:
    """Return what all layers hold. Raises Unplaced for what is not coded."""
    dtypes = {layer.dtype for layer in layers}
    if len(dtypes) != 1 or (dtype := DTYPES.get(dtypes.pop())) is None:
        raise Unplaced("the KV cache is not bfloat16, float16 or float32")
    return dtype


def _places(layer: torch.Tensor, packing: Packing) -> list[Place]:
    sides = _sides(layer, packing)
    tokens = layer.shape[2]
    grids = [np.indices((tokens, side.heads, side.channels)) for side in sides]
    if max(int(grid.max()) for grid in grids) // _MARKS > _MARKS:
        raise Unplaced(f"a layer of shape {tuple(layer.shape)}")
    landed = []
    for axis in range(3):
        low = _written(layer, packing, [grid[axis] % _MARKS for grid in grids])
        high = _written(layer, packing, [grid[axis] // _MARKS for grid in grids])
        landed.append([a + _MARKS * b for a, b in zip(low, high, strict=True)])
    return [
        _place(side.kind, head, token, channel, (side.heads, tokens, side.channels))
        for side, token, head, channel in zip(sides, *landed, strict=True)
    ]


class _Side(NamedTuple):
    """One of the two things that a block keeps of each token."""

    kind: str
    heads: int
    channels: int


def _sides(layer: torch.Tensor, packing: Packing) -> list[_Side]:
    """Return the two sides of a layer: keys and values, or latents and rotary parts."""
    shape, latent = tuple(layer.shape), packing.latent
    if latent is not None:
        if len(shape) != 4 or not latent.rotary:
            raise Unplaced(
                f"a layer of shape {shape} with rotary parts of {latent.rotary} channels"
            )
        return [_Side(kind, 1, count) for kind, count in latent.sides(shape[1], shape[3])]
    if len(shape) != 4 or shape[3] % 2 or not packing.isa:
        raise Unplaced(f"a layer of shape {shape} packed as {packing.isa!r}")
    return [_Side(kind, shape[1], shape[3] // 2) for kind in "KV"]


def _written(layer: torch.Tensor, packing: Packing, marks: Sequence[_Ints]) -> list[_Ints]:
    """Return what a block's memory holds after marks + 1 were written, by the side they are of.

    marks: of both sides, each (N, H, C). Where the other side was written, or nothing, the memory
    holds -1.
    """
    values = [torch.from_numpy(each + 1).to(layer.dtype) for each in marks]
    found = []
    for side in values:
        block = torch.empty_strided((1, *layer.shape[1:]), layer.stride(), dtype=layer.dtype)
        flat = block.as_strided((block.untyped_storage().nbytes() // block.element_size(),), (1,))
        flat.zero_()
        first, second = (each if each is side else torch.zeros_like(each) for each in values)
        _write(packing, block, first, second)
        found.append(flat.float().numpy().astype(np.int64) - 1)
    return found


def _write(
    packing: Packing, block: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> None:
    """Write both sides of all tokens (N, H, C) into a block (1, H, N, ...), as the engine does."""
    heads, tokens = block.shape[1:3]
    slots = torch.arange(tokens, dtype=torch.int64)
    if packing.latent is not None:
        packing.latent.write(first[:, 0], second, block.squeeze(1), slots)
        return
    from vllm import _custom_ops as ops

    key_cache, value_cache = block.view(1, heads, 2 * tokens, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(first, second, key_cache, value_cache, slots, packing.isa)


def _place(
    kind: str, head: _Ints, token: _Ints, channel: _Ints, counts: tuple[int, int, int]
) -> Place:
    """Describe where values landed. Raises Unplaced if no table of strides does."""
    at = np.full(counts, -1, np.int64)
    (written,) = np.nonzero(head >= 0)
    if len(written) != at.size:
        raise Unplaced(f"{kind}: {len(written)} of {at.size} values were found again")
    at[head[written], token[written], channel[written]] = written
    if (at < 0).any():
        raise Unplaced(f"{kind}: two values were found in one place")
    axes = [_axis(at[:, 0, 0]), _axis(at[0, :, 0]), _axis(at[0, 0, :])]
    first = int(at[0, 0, 0])
    lines = [np.array([axis.at(i) for i in range(axis.count)]) for axis in axes]
    expected = first + lines[0][:, None, None] + lines[1][None, :, None] + lines[2][None, None, :]
    if not np.array_equal(at, expected):
        raise Unplaced(f"{kind}: values do not lie in a table of strides")
    return Place(kind, axes[0], axes[1], axes[2], first)


def _axis(line: _Ints) -> Axis:
    """Describe the places along one axis by two strides."""
    steps = line - line[0]
    count = len(steps)
    near = int(steps[1]) if count > 1 else 0
    (uneven,) = np.nonzero(steps != np.arange(count) * near)
    if not len(uneven):
        return Axis(count, near)
    run = int(uneven[0])
    return Axis(count, near, run, int(steps[run]))
