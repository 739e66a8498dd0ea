"""What makes one engine's KV not interchangeable with another's, and which engines we serve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvstore.model.block import Group, Namespace
from kvstore.model.errors import Incompatible
from kvstore.model.names import model_name
from kvstore.settings import default_digest_memory
from kvstore.system.file_digests import FileDigests
from kvstore.system.fingerprints import Fingerprints, Source
from kvstore.system.model_files import model_path, weights_files
from kvstore_trtllm.model_config import Untold, check_pool, check_scales, read_files, text_model

_NAME_THEM = 'name them in TRTLLM_KVSTORE, e.g. "weights_id": "my-model-v3"'
_REFUSED = (
    ("pipeline_parallel_size", 1, "kvstore does not support pipeline parallelism here"),
    ("context_parallel_size", 1, "kvstore does not support context parallelism here"),
    ("max_beam_width", 1, "kvstore does not support beam search here"),
    ("enable_attention_dp", False, "kvstore does not support attention data parallelism here"),
    (
        "orchestrator_type",
        None,
        "kvstore needs ranks that talk by MPI; leave orchestrator_type out",
    ),
    ("speculative_config", None, "rejected drafts leave KV behind; turn speculation off"),
    ("sparse_attention_config", None, "kvstore does not support sparse attention here"),
    ("kv_cache_config.enable_block_reuse", True, "set kv_cache_config.enable_block_reuse: true"),
    (
        "kv_cache_config.enable_partial_reuse",
        False,
        "a prefix that ends inside a block is not gone on from; "
        "set kv_cache_config.enable_partial_reuse: false",
    ),
    (
        "kv_cache_config.host_cache_size",
        0,
        "blocks in TensorRT-LLM's own host memory have other numbers than those on the device; "
        "set kv_cache_config.host_cache_size: 0",
    ),
    (
        "kv_cache_config.max_attention_window",
        None,
        "kvstore does not support sliding windows here; leave out max_attention_window",
    ),
    (
        "kv_cache_config.use_kv_cache_manager_v2",
        False,
        "set kv_cache_config.use_kv_cache_manager_v2: false",
    ),
)
"""Options, the only value that is supported, and what to do."""
_KV_FOLLOWS = (
    "attn_backend",
    "checkpoint_format",
    "dtype",
    "kv_cache_config.dtype",
    "model_kwargs",
    "quant_config",
)
"""Options that the KV of given tokens depends on, beside the weights and the shape of the pool."""


def option(llm_args: Any, name: str, default: Any = None) -> Any:
    """Return an option of TensorRT-LLM, "a.b" of its section a; `default` where there is none."""
    for each in name.split("."):
        if llm_args is None:
            return default
        llm_args = getattr(llm_args, each, default)
    return llm_args


def check_supported(llm_args: Any) -> None:
    """Raise Incompatible, naming what to change, for an engine whose KV cannot be kept."""
    for name, supported, reason in _REFUSED:
        found = option(llm_args, name, supported)
        if found is not None and found != supported:
            raise Incompatible(f"{name}={found!r}: {reason}")
    for name in ("kv_cache_config.dtype", "quant_config.kv_cache_quant_algo"):
        found = option(llm_args, name)
        if "FP4" in str(found).upper():
            raise Incompatible(f"{name}={found!s}: kvstore does not support NVFP4 KV here")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank knows of its pool: all ranks have to say the same.

    block_tokens: of one block. record_nbytes: of one block of one rank. shards: ranks that hold KV
    of their own; 1 where all hold the same, as with latent attention. text: the rest.
    """

    block_tokens: int
    record_nbytes: int
    shards: int
    text: str


def facts_of(
    llm_args: Any, pool: torch.Tensor, version: str, *, allow_untested: bool = False
) -> Facts:
    """Describe a pool, (blocks, layers, keys and values, values of one of them).

    allow_untested: go by the options alone where the model's files do not tell its KV. Raises
    Incompatible for another kind of pool, and for one that does not hold all KV of the model.
    """
    if pool.dim() != 4 or not pool.is_contiguous():
        raise Incompatible(f"a KV pool of shape {tuple(pool.shape)} is not known")
    latent = pool.shape[2] == 1  # keys alone: values are computed from them
    workers = int(option(llm_args, "tensor_parallel_size", 1) or 1)
    block_tokens = int(option(llm_args, "kv_cache_config.tokens_per_block"))
    try:
        files = read_files(str(llm_args.model), option(llm_args, "revision"))
        check_scales(files)
        model = text_model(files["config.json"], option(llm_args, "model_kwargs"))
        check_pool(model, pool, workers, block_tokens)
    except Untold:
        if not allow_untested:
            raise
    told = {
        "version": version,
        "pool": list(pool.shape[1:]),
        "dtype": str(pool.dtype),
        "tensor_parallel": 1 if latent else workers,
        **{name: str(option(llm_args, name)) for name in _KV_FOLLOWS},
    }
    return Facts(
        block_tokens=block_tokens,
        record_nbytes=pool[0].numel() * pool.element_size(),
        shards=1 if latent else workers,
        text=json.dumps(told, sort_keys=True),
    )


def describe(facts: Facts, model: str) -> Namespace:
    """Return the namespace of an engine, but for its weights."""
    told = json.loads(facts.text)
    identity = {
        "engine": f"tensorrt-llm {told['version']}",
        "kv_dtype": f"{told['kv_cache_config.dtype']}/{told['dtype']}",
        "page": "block, layer, K and V",
        "layers": hashlib.sha256(facts.text.encode()).hexdigest(),
        "tensor_parallel": str(told["tensor_parallel"]),
    }
    return Namespace(
        block_tokens=facts.block_tokens,
        groups=(Group("0", facts.record_nbytes, shards=facts.shards),),
        identity=tuple(sorted(identity.items())),
        name=model_name(model),
    )


def open_weights(llm_args: Any, weights_id: str) -> Fingerprints:
    """Begin to hash the files of the weights. Raises Incompatible if no file tells them."""
    sources: dict[str, Source] = {"weights": weights_id or _files(llm_args)}
    return Fingerprints(sources, FileDigests(default_digest_memory()))


def with_weights(namespace: Namespace, found: Mapping[str, str]) -> Namespace:
    identity = {**dict(namespace.identity), **found}
    return replace(namespace, identity=tuple(sorted(identity.items())))


def _files(llm_args: Any) -> list[Path]:
    how = str(option(llm_args, "load_format", "auto"))
    if not how.lower().endswith("auto") or option(llm_args, "checkpoint_loader") is not None:
        raise Incompatible(f"what load_format={how} loads is not told by files; {_NAME_THEM}")
    path = model_path(
        str(llm_args.model),
        revision=option(llm_args, "revision"),
        folder=None,
        advice=_NAME_THEM,
    )
    return weights_files(path, advice=_NAME_THEM)
