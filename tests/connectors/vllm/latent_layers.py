"""The KV cache of vLLM's latent attention, written by its back ends for the CPU, and as its back
ends for GPUs have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvstore_vllm.packings import Packing, packings_of

RANK, ROTARY = 512, 64
ROW = RANK + ROTARY


def latent_spec(**changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    fields = {"block_size": 32, "num_kv_heads": 1, "head_size": ROW, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**{**fields, **changes})


def latent_module(backend: str, **changes: Any) -> Any:
    """Return what a layer of latent attention tells of itself. On a CPU it has the back end's own
    function; one for GPUs has none here."""
    from vllm.v1.attention.backends.mla import amx_mla, cpu_mla

    impls = {"AMX_MLA": amx_mla.AMXMLAImpl, "CPU_MLA": cpu_mla.CPUMLAImpl}
    found = {
        "get_attn_backend": lambda: SimpleNamespace(get_name=lambda: backend),
        "impl": object.__new__(impls[backend]) if backend in impls else None,
        "kv_cache_dtype": "auto",
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROTARY,
        "_k_scale": torch.ones(()),
    }
    return SimpleNamespace(**{**found, **changes})


def packing_of(module: Any, spec: Any = None) -> Packing:
    """Return how one layer is packed."""
    spec = latent_spec() if spec is None else spec
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["0"])
    ((packing,),) = packings_of({"0": module}, [group])
    return packing


def latent_packing(backend: str, **changes: Any) -> Packing:
    """The same by what the layer tells of itself."""
    return packing_of(latent_module(backend, **changes))


def latent_layers(
    backend: str, dtype: torch.dtype, tokens: int, *, count: int = 3, blocks: int = 6
) -> tuple[list[torch.Tensor], list[Packing]]:
    """Return layers (blocks, 1, tokens, 576) as an engine on a CPU fills them, and how each is
    packed."""
    module = latent_module(backend)
    generator = torch.Generator().manual_seed(tokens)
    layers = []
    for _ in range(count):
        latents, rotated = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((blocks * tokens, RANK), (blocks * tokens, 1, ROTARY))
        )
        layer = torch.zeros((blocks, 1, tokens, ROW), dtype=dtype)
        slots = torch.arange(blocks * tokens)
        module.impl.do_kv_cache_update(
            latents, rotated, layer.squeeze(1), slots, "auto", module._k_scale
        )
        layers.append(layer)
    return layers, [packing_of(module)] * count


def in_layout(layout: str, layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same layers as a GPU's engine registers them, their axes in the order of the
    letters; "in kernel blocks": a block is two of them."""
    axes, _, kernel_blocks = layout.partition(" in ")
    values = torch.stack(layers)
    if kernel_blocks:
        values = values.unflatten(3, (2, -1)).transpose(2, 3).flatten(1, 2)
    order = ["LBHNC".index(axis) for axis in axes]
    physical = values.permute(order).contiguous()
    return list(physical.permute([axes.index(axis) for axis in "LBHNC"]).unbind(0))
