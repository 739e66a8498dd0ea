"""What makes one engine's KV bytes not interchangeable with another's, and which engines we serve.

Built by every worker when its KV cache exists: only then are the attention back end and the sizes
known for certain. The scheduler side gets it through vLLM's handshake.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore.block import Group, Namespace, model_name
from kvstore.errors import Incompatible
from kvstore_vllm import compat
from kvstore_vllm.fingerprint import weights_fingerprint

_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def check_supported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Raise Incompatible, naming the reason, for an engine whose KV this connector cannot keep."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Incompatible("kvstore does not support pipeline parallelism yet")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Incompatible("kvstore does not support context parallelism yet")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Incompatible("KV scales calculated at run time differ between engines; turn them off")
    if kv_cache_config.needs_kv_cache_zeroing:
        raise Incompatible("kvstore does not support Mamba or mixed-precision KV caches yet")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for layer in chain.from_iterable(map(_layer_specs, specs)):
        supported = type(layer) in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
        if not supported or getattr(layer, "non_causal", False):
            raise Incompatible(f"kvstore does not support {type(layer).__name__} KV groups yet")
    sizes = {spec.block_size for spec in specs} | {compat.hash_block_size(kv_cache_config)}
    if len(sizes - {None}) != 1:
        raise Incompatible(f"kvstore needs one block size for all KV groups, not {sizes}")


def build_namespace(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    *,
    record_nbytes: list[int],
    backends: list[str],
    weights_id: str = "",
) -> Namespace:
    """Describe the KV of one engine.

    record_nbytes: bytes of one block of each group in one worker, as allocated.
    backends: names of the attention back ends (and CPU instruction sets), which decide how keys and
    values are packed inside a page.
    Raises Incompatible if the weights cannot be identified.
    """
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    shards = tensor_parallel // compat.kv_tp_replicas(kv_cache_config)
    groups = tuple(
        Group(
            name=f"{index}",
            record_nbytes=nbytes,
            window_tokens=_window_tokens(group.kv_cache_spec),
            shards=shards,
        )
        for index, (group, nbytes) in enumerate(
            zip(kv_cache_config.kv_cache_groups, record_nbytes, strict=True)
        )
    )
    cache = vllm_config.cache_config
    identity = {
        "engine": "vllm",
        "model": _model_identity(vllm_config.model_config),
        "weights": weights_id or _weights(vllm_config, vllm_config.model_config),
        "kv_dtype": f"{cache.cache_dtype}/{vllm_config.model_config.dtype}",
        "page": compat.PAGE_LAYOUT,
        "backends": ",".join(backends),
        "layers": _digest([group.layer_names for group in kv_cache_config.kv_cache_groups]),
        "tensor_parallel": str(tensor_parallel),
    }
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != vllm_config.model_config.model:
        # Layers of a drafter live in the same groups: other drafts, other bytes.
        identity["draft"] = _model_identity(draft) + weights_fingerprint(_model_path(draft))
    return Namespace(
        block_tokens=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        groups=groups,
        identity=tuple(sorted(identity.items())),
        name=model_name(vllm_config.model_config.model),
    )


def _layer_specs(spec: Any) -> list[Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _window_tokens(spec: Any) -> int:
    """Return how many trailing tokens a group keeps, 0 for all.

    A full-attention spec may name a window too (hybrid manager off): its blocks are kept anyway.
    """
    windows = {
        layer.sliding_window + layer.extra_retained_tokens
        for layer in _layer_specs(spec)
        if isinstance(layer, SlidingWindowSpec)
    }
    return max(windows, default=0)


def _model_identity(model: Any) -> str:
    """Return a digest of the model's configuration with all overrides applied."""
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    rope = json.dumps(config, default=str)
    if "longrope" in rope or "dynamic" in rope:
        config["max_model_len"] = model.max_model_len  # these scale positions by it
    config["quantization"] = model.quantization
    return _digest(config)


def _weights(vllm_config: Any, model: Any) -> str:
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy seed {model.seed}"
    return weights_fingerprint(_model_path(model))


def _model_path(model: Any) -> Path:
    """Return where the weights of `model` lie on this machine."""
    path = Path(getattr(model, "model_weights", "") or model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise Incompatible(
            f"cannot find the weights of {model.model} on this machine; name them in "
            'kv_connector_extra_config, e.g. "weights_id": "my-model-v3"'
        ) from error


def _digest(value: Mapping[str, object] | list[Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
