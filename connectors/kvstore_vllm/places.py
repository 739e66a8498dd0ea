"""Where vLLM's CPU back end puts keys and values inside a block: found out by asking it to.

It packs keys for its instruction set, in ways that differ by processor, head size and block size.
So its own function writes marks (the number of the head, the token and the channel) into a scratch
block, and where they land is read back. If that is a table of strides, records can be coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_kernels.codec.record import DType

DTYPES = {
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float32: DType.FP32,
}
_MARKS = 128  # every dtype holds the numbers below it, and one more
_Ints = npt.NDArray[np.int64]


def shape_of(layers: Sequence[torch.Tensor], isas: Sequence[str]) -> Shape:
    """Return the shape of a record of `layers`, each (B, H, N, 2D) in host memory.

    isas: how the back end packs each layer. Raises Unplaced, saying why, where it is not known.
    """
    dtype = dtype_of(layers)
    known: dict[tuple[Any, ...], list[Place]] = {}
    places = []
    for layer, isa in zip(layers, isas, strict=True):
        kind = (isa, layer.shape[1:], layer.stride()[1:])
        if kind not in known:
            known[kind] = _places(layer, isa)
        places.append(known[kind])
    return Shape(places, dtype)


def dtype_of(layers: Sequence[torch.Tensor]) -> DType:
    """Return what all layers hold. Raises Unplaced for what is not coded."""
    dtypes = {layer.dtype for layer in layers}
    if len(dtypes) != 1 or (dtype := DTYPES.get(dtypes.pop())) is None:
        raise Unplaced("the KV cache is not bfloat16, float16 or float32")
    return dtype


def _places(layer: torch.Tensor, isa: str) -> list[Place]:
    if layer.dim() != 4 or layer.shape[3] % 2 or not isa:
        raise Unplaced(f"a layer of shape {tuple(layer.shape)} packed as {isa!r}")
    heads, tokens, channels = layer.shape[1], layer.shape[2], layer.shape[3] // 2
    index = np.indices((tokens, heads, channels))
    marks = [part for axis in index for part in (axis % _MARKS, axis // _MARKS)]
    if max(int(each.max()) for each in marks) > _MARKS:
        raise Unplaced(f"a block of {tokens} tokens, {heads} heads and {channels} channels")
    landed = [_written(layer, isa, each) for each in marks]
    places = []
    for kind, side in (("K", 0), ("V", 1)):
        low_high = [where[side] for where in landed]
        token, head, channel = (
            low_high[2 * axis] + _MARKS * low_high[2 * axis + 1] for axis in range(3)
        )
        places.append(_place(kind, head, token, channel, (heads, tokens, channels)))
    return places


def _written(layer: torch.Tensor, isa: str, marks: _Ints) -> tuple[_Ints, _Ints]:
    """Return what a block's memory holds after `marks` + 1 were written as keys, and as values.

    Where the other side was written, or nothing, it holds -1.
    """
    from vllm import _custom_ops as ops

    values = torch.from_numpy(marks + 1).to(layer.dtype)
    nothing = torch.zeros_like(values)
    slots = torch.arange(layer.shape[2], dtype=torch.int64)
    found = []
    for key, value in ((values, nothing), (nothing, values)):
        block = torch.empty_strided((1, *layer.shape[1:]), layer.stride(), dtype=layer.dtype)
        flat = block.as_strided((block.untyped_storage().nbytes() // block.element_size(),), (1,))
        flat.zero_()
        heads, tokens = layer.shape[1], layer.shape[2]
        key_cache, value_cache = block.view(1, heads, 2 * tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
        found.append(flat.float().numpy().astype(np.int64) - 1)
    return found[0], found[1]


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
