"""How vLLM's back ends pack the blocks of their layers, as far as the engine itself tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from kvstore_kernels.codec.places import Unplaced

Write: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes latents (T, rank) and rotary parts (T, 1, rotary) to slots (T,) of a cache (B, N, C)."""


@dataclass(frozen=True, slots=True)
class Latent:
    """What latent attention (MLA) keeps of each token: one vector for all heads of its queries.

    rank, rotary: the channels of the latent, and of the rotary part behind it. write: how the
    engine writes both.
    """

    rank: int
    rotary: int
    write: Write = field(compare=False)

    def sides(self, heads: int, channels: int) -> list[tuple[str, int]]:
        """Return the kinds of places in a block, in their order, and the channels of each.

        heads, channels: of the layer's memory. Raises Unplaced if that is not what a block has.
        """
        known = heads == 1 and self.rank > 0 and self.rotary >= 0
        if not known or self.rank + self.rotary != channels:
            raise Unplaced(
                f"latents of {self.rank} channels and rotary parts of {self.rotary} are not what "
                f"{heads} heads of {channels} channels hold"
            )
        return [("latent", self.rank), *([("rope", self.rotary)] if self.rotary else [])]


@dataclass(frozen=True, slots=True)
class Packing:
    """How one layer is packed. By default, that is unknown.

    backend: the name of its attention back end; "" if a block has anything else in it than
    latents, or keys and as many values. isa: the instruction set that a CPU's keys and values are
    packed for; "" unknown. latent: of latent attention; None: keys and values.
    """

    backend: str = ""
    isa: str = ""
    latent: Latent | None = None


def backend_of(module: Any) -> str:
    """Return the name of a layer's attention back end; "unknown" where there is no module."""
    return module.get_attn_backend().get_name() if module is not None else "unknown"


def packings_of(modules: Mapping[str, Any], groups: Sequence[Any]) -> list[list[Packing]]:
    """Return how each layer of each of some groups of vLLM's KV cache configuration is packed.

    modules: the attention modules, by layer.
    """
    return [
        [_packing(modules.get(name), _spec_of(group, name)) for name in group.layer_names]
        for group in groups
    ]


def _spec_of(group: Any, name: str) -> Any:
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if by_layer is None else by_layer[name]


def _packing(module: Any, spec: Any) -> Packing:
    isa = getattr(module, "isa", "")
    if getattr(spec, "state_content_bytes", None) is not None:  # scales, or other packed content
        return Packing(isa=isa)
    latent = _latent(module)
    if latent is None and getattr(spec, "head_size_v", -1) != spec.head_size:
        return Packing(isa=isa)
    return Packing(backend_of(module), isa, latent)


def _latent(module: Any) -> Latent | None:
    """Return what a module of latent attention says of its tokens; None for any other module."""
    rank, rotary = (getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if rank is None or rotary is None:
        return None

    def write(
        latents: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        module.impl.do_kv_cache_update(
            latents, rotated, cache, slots, module.kv_cache_dtype, module._k_scale
        )

    return Latent(int(rank), int(rotary), write)
