"""The KV cache of vLLM's CPU back end, without an engine around it."""

from __future__ import annotations

import warnings

import pytest

BLOCKS = 6


def import_vllm() -> None:
    """Import it, or skip: it takes a while and warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm")
        from kvstore_vllm import compat

        if not compat.STANDARD_LAYOUTS:
            pytest.skip("vLLM before 0.30 lays blocks out in another way")
        from vllm.v1.attention.backends import cpu_attn  # noqa: F401


def engine_layers(dtype, tokens: int, head: int, *, count: int = 3, blocks: int = BLOCKS):
    """Return layers as the engine fills them, keys and values written by its own function, and how
    each is packed."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvstore_vllm.packings import Packing

    isa = _get_attn_isa(dtype, tokens, head)
    torch.manual_seed(3)
    layers = []
    for _ in range(count):
        layer = torch.zeros((blocks, 2, tokens, 2 * head), dtype=dtype)
        kv = [torch.randn(blocks * tokens, 2, head).to(dtype) for _ in "kv"]
        key_cache, value_cache = layer.view(blocks, 2, 2 * tokens, -1).chunk(2, dim=2)
        slots = torch.arange(blocks * tokens)
        ops.cpu_attn_reshape_and_cache(*kv, key_cache, value_cache, slots, isa)
        layers.append(layer)
    return layers, [Packing(isa=isa)] * count
