"""What the model's files say of its KV: whether the pool holds all of it, and in which blocks.

TensorRT-LLM registers one pool with its connectors. It has more where layers differ in their KV
heads, for the scales of NVFP4, and for the keys of an indexer. And its blocks may have other sizes
than the option says: the executor changes a variable of its own for some attention kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvstore.model.errors import Incompatible
from kvstore.system.model_files import model_path

_ADVICE = 'to try it all the same, add "allow_untested": true to TRTLLM_KVSTORE'


class Untold(Incompatible):
    """The model's files do not say what its KV is."""


def check_pool(model: Mapping[str, Any], pool: torch.Tensor, workers: int, tokens: int) -> None:
    """Raise Incompatible unless `pool` holds all KV of one of `workers` ranks.

    model: its config.json. pool: (blocks, layers, keys and values, values of one block). tokens: of
    a block, as the option says. Raises Untold if config.json does not tell.
    """
    if model.get("index_topk") is not None:
        raise Incompatible("index_topk in config.json: kvstore does not support indexers here")
    heads = model.get("num_key_value_heads")
    if isinstance(heads, list) or model.get("block_configs") is not None:
        raise Incompatible("kvstore does not support layers with different KV heads here")
    layers = _number(model, "num_hidden_layers")
    if pool.shape[1] != layers:
        raise Incompatible(
            f"the KV pool holds {pool.shape[1]} layers, and the model has {layers}: kvstore "
            "supports only models with all KV in one pool here"
        )
    latent = bool(model.get("kv_lora_rank"))
    if latent != (pool.shape[2] == 1):
        raise Incompatible(f"a KV pool of shape {tuple(pool.shape)} is not known for this model")
    of_token = _latent_size(model) if latent else _heads_size(model, workers)
    found, rest = divmod(pool.shape[3], of_token)
    if rest:
        raise Incompatible(
            f"a block of the KV pool has {pool.shape[3]} values a layer, and a token "
            f"{of_token} by config.json: kvstore does not support this model here"
        )
    if found != tokens:
        raise Incompatible(
            f"kv_cache_config.tokens_per_block={tokens}: blocks of the KV pool have {found} "
            f"tokens; set kv_cache_config.tokens_per_block: {found}"
        )


def check_scales(files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise Incompatible if a checkpoint's KV is NVFP4. files: JSON by name."""
    told = files.get("hf_quant_config.json", {}).get("quantization") or {}
    model = files.get("config.json", {}).get("quantization_config") or {}
    scheme = model.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    named = [each.get("kv_cache_quant_algo") for each in (told, model)]
    if bits == 4 or any("FP4" in str(each).upper() for each in named):
        raise Incompatible(
            "the checkpoint's KV cache is NVFP4: kvstore does not support NVFP4 KV here"
        )


def read_files(model: str, revision: str | None) -> dict[str, Any]:
    """Return what of config.json and hf_quant_config.json is on this machine, by name.

    Raises Untold if config.json is not, or is not JSON.
    """
    advice = f"kvstore needs its config.json; {_ADVICE}"
    try:
        folder = model_path(model, revision=revision, folder=None, advice=advice)
        found = {"config.json": _read(folder / "config.json")}
        if (folder / "hf_quant_config.json").exists():
            found["hf_quant_config.json"] = _read(folder / "hf_quant_config.json")
    except (Incompatible, OSError, ValueError) as error:
        raise Untold(f"cannot read what KV {model} has ({error}); {_ADVICE}") from error
    return found


def text_model(config: Mapping[str, Any], overrides: Any) -> dict[str, Any]:
    """Return the part of a config.json that says what KV there is, with TensorRT-LLM's overrides
    of it (model_kwargs)."""
    told = {**config, **(overrides or {})}
    inner = told.get("text_config")
    return {**told, **inner} if isinstance(inner, dict) else told


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def _latent_size(model: Mapping[str, Any]) -> int:
    return _number(model, "kv_lora_rank") + _number(model, "qk_rope_head_dim")


def _heads_size(model: Mapping[str, Any], workers: int) -> int:
    """As TensorRT-LLM counts: without KV heads there are as many as heads, and a rank has one at
    least."""
    attention = "num_attention_heads"
    has_heads = model.get("num_key_value_heads") is not None
    heads = _number(model, "num_key_value_heads" if has_heads else attention)
    if model.get("head_dim") is not None:
        dim = _number(model, "head_dim")
    else:
        dim = _number(model, "hidden_size") // _number(model, attention)
    return -(-heads // workers) * max(1, dim)


def _number(model: Mapping[str, Any], name: str) -> int:
    found = model.get(name)
    if type(found) is not int or found < 1:
        raise Untold(f"config.json does not tell {name}, which kvstore needs; {_ADVICE}")
    return found
