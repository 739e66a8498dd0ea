"""Where vLLM's back ends on GPUs put keys and values inside a block: side by side.

From vLLM 0.30 on a layer is (B, H, N, 2D), its axes in any order in memory. The back ends named
here split the last one in the middle: keys first, then values. Records do not depend on the order
in memory: their shape is that of a block as it reads, and the places are where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_vllm.places import dtype_of

BACKENDS = {"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"}
"""All that were read. Others pack keys and values in ways of their own (MLA), or in more bytes
than those of the values (scales)."""


def shape_side_by_side(layers: Sequence[torch.Tensor], backends: Sequence[str]) -> Shape:
    """Return the shape of a record of `layers`, as `by_block` returns them.

    backends: what each layer's attention is computed by, "" unknown. Raises Unplaced, saying why,
    where it is not known that keys and values lie side by side.
    """
    unknown = sorted(set(backends) - BACKENDS)
    if unknown:
        raise Unplaced(f"where the back ends {unknown} put keys and values is not known")
    dtype = dtype_of(layers)
    places = []
    for layer in layers:
        heads, tokens, channels = _counts(layer)
        row = 2 * channels
        axes = Axis(heads, tokens * row), Axis(tokens, row), Axis(channels, 1)
        places.append([Place("K", *axes), Place("V", *axes, first=channels)])
    return Shape(places, dtype)


def places_side_by_side(layers: Sequence[torch.Tensor]) -> list[list[Place]]:
    """Return where the values of a record lie in a block of `layers`."""
    places = []
    for layer in layers:
        heads, tokens, channels = _counts(layer)
        of_block = layer.stride()[1:]
        if layer.dim() == 4:
            by_token = Axis(tokens, of_block[1])
        else:
            by_token = Axis(tokens, of_block[2], run=layer.shape[3], far=of_block[1])
        axes = Axis(heads, of_block[0]), by_token, Axis(channels, of_block[-1])
        places.append([Place("K", *axes), Place("V", *axes, first=channels * of_block[-1])])
    return places


def _counts(layer: torch.Tensor) -> tuple[int, int, int]:
    """Return the heads, tokens and channels of a block's keys, and of its values.

    A block is (H, N, 2D); or (H, kernel blocks, n, 2D), whose tokens follow each other.
    """
    if layer.dim() not in (4, 5) or layer.shape[-1] % 2:
        raise Unplaced(f"a layer of shape {tuple(layer.shape)}")
    return layer.shape[1], layer.shape[2:-1].numel(), layer.shape[-1] // 2
