"""Where vLLM's back ends on GPUs put keys and values inside a block: side by side.

From vLLM 0.30 on a layer is (B, H, N, 2D), its axes in any order in memory. The back ends named
here split the last one in the middle: keys first, then values. Records do not depend on the order
in memory: their shape is that of a block as it reads, and the places are where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_vllm.places import dtype_of

BACKENDS = {"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"}
"""All that were read. Others pack keys and values in ways of their own (MLA), or in more bytes
than those of the values (scales)."""


def backend_of(module: Any) -> str:
    """Return the name of a layer's attention back end; "unknown" where there is no module."""
    return module.get_attn_backend().get_name() if module is not None else "unknown"


def backends_of(modules: Mapping[str, Any], groups: Sequence[Any]) -> list[list[str]]:
    """Return the back end of each layer of each of some groups of vLLM's KV cache configuration.

    modules: the attention modules, by layer. "" for a layer that has anything else than as many
    keys as values in its blocks, whatever its back end.
    """
    return [
        [
            backend_of(modules.get(name)) if _is_plain(_spec_of(group, name)) else ""
            for name in group.layer_names
        ]
        for group in groups
    ]


def _spec_of(group: Any, name: str) -> Any:
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if by_layer is None else by_layer[name]


def _is_plain(spec: Any) -> bool:
    """Say whether a block has keys and values and nothing else: no scales, no latent."""
    packed = getattr(spec, "state_content_bytes", None)
    return packed is None and getattr(spec, "head_size_v", -1) == spec.head_size


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
