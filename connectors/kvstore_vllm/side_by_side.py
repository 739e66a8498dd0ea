"""Where vLLM's back ends on GPUs put the values of a token inside a block: side by side.

From vLLM 0.30 on a layer is (B, H, N, C), its axes in any order in memory. The back ends named
here split the last one: keys first, then as many values; or, for latent attention, the latent
first, then the rotary part. Records do not depend on the order in memory: their shape is that of a
block as it reads, and the places are where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_vllm.packings import Packing
from kvstore_vllm.places import dtype_of

BACKENDS = {"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"}
LATENT_BACKENDS = {"CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"}
"""All that were read. Others pack values in ways of their own, or in more bytes than those of the
values (scales, sparse attention)."""


def shape_side_by_side(layers: Sequence[torch.Tensor], packings: Sequence[Packing]) -> Shape:
    """Return the shape of a record of `layers`, as `by_block` returns them.

    packings: of each layer. Raises Unplaced, saying why, where it is not known what lies side by
    side.
    """
    unknown = sorted({each.backend for each in packings if not _is_known(each)})
    if unknown:
        raise Unplaced(f"where the back ends {unknown} put keys and values is not known")
    dtype = dtype_of(layers)
    places = []
    for layer, packing in zip(layers, packings, strict=True):
        heads, tokens, row = _counts(layer)
        places.append(_split(packing, Axis(heads, tokens * row), Axis(tokens, row), Axis(row, 1)))
    return Shape(places, dtype)


def places_side_by_side(
    layers: Sequence[torch.Tensor], packings: Sequence[Packing]
) -> list[list[Place]]:
    """Return where the values of a record lie in a block of `layers`."""
    places = []
    for layer, packing in zip(layers, packings, strict=True):
        heads, tokens, row = _counts(layer)
        of_block = layer.stride()[1:]
        if layer.dim() == 4:
            by_token = Axis(tokens, of_block[1])
        else:
            by_token = Axis(tokens, of_block[2], run=layer.shape[3], far=of_block[1])
        axes = Axis(heads, of_block[0]), by_token, Axis(row, of_block[-1])
        places.append(_split(packing, *axes))
    return places


def _is_known(packing: Packing) -> bool:
    return packing.backend in (LATENT_BACKENDS if packing.latent else BACKENDS)


def _split(packing: Packing, heads: Axis, tokens: Axis, row: Axis) -> list[Place]:
    """Return the places of a layer whose rows have all that is kept of a token for a head."""
    if packing.latent is not None:
        sides = packing.latent.sides(heads.count, row.count)
        heads = Axis(1, 0)  # wherever another one would be
    elif row.count % 2:
        raise Unplaced(f"rows of {row.count} channels")
    else:
        sides = [("K", row.count // 2), ("V", row.count // 2)]
    places, first = [], 0
    for kind, channels in sides:
        places.append(Place(kind, heads, tokens, Axis(channels, row.near), first * row.near))
        first += channels
    return places


def _counts(layer: torch.Tensor) -> tuple[int, int, int]:
    """Return the heads, tokens and channels of a block's rows.

    A block is (H, N, C); or (H, kernel blocks, n, C), whose tokens follow each other.
    """
    if layer.dim() not in (4, 5):
        raise Unplaced(f"a layer of shape {tuple(layer.shape)}")
    return layer.shape[1], layer.shape[2:-1].numel(), layer.shape[-1]
