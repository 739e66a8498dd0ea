"""What makes one engine's KV bytes not interchangeable with another's, and which engines we serve.

Built by every worker when its KV cache exists: only then are the attention back end and the sizes
known for certain. The scheduler side gets it through vLLM's handshake, or with a step. Either side
takes part when it knows the weights as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstore.model.block import SALTED, Group, Namespace
from kvstore.model.errors import Incompatible
from kvstore.model.names import model_name
from kvstore.system.model_files import model_path
from kvstore_vllm import compat
from kvstore_vllm.fingerprint import NAME_THEM, Fingerprints, Source, weights_files
from kvstore_vllm.metadata import PIPELINE, LossySizes
from kvstore_vllm.stages import Stage, stored_groups

_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
_READ_FROM_FILES = {
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "pt",
    "runai_streamer",
    "safetensors",
    "sharded_state",
}
"""Load formats that read the files of the model's folder as they are, and nothing else."""


def check_supported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Raise Incompatible, naming the reason, for an engine whose KV this connector cannot keep."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Incompatible("kvstore does not support context parallelism yet")
    if vllm_config.cache_config.enable_prefix_caching is False:
        raise Incompatible(
            "prefix caching is off in this engine. vLLM turns it off where it cannot go on from a "
            "stored prefix (latent attention on a CPU without AMX, for one), and kvstore asks for "
            "just that; if you turned it off yourself, drop --no-enable-prefix-caching"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Incompatible("KV scales calculated at run time differ between engines; turn them off")
    if kv_cache_config.needs_kv_cache_zeroing:
        raise Incompatible(
            "kvstore does not support Mamba layers, which keep a state instead of keys and values, "
            "nor mixed-precision KV caches yet"
        )
    if not any(group.layer_names for group in kv_cache_config.kv_cache_groups):
        raise Incompatible("no layer of this worker has a KV cache; use fewer pipeline stages")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for layer in chain.from_iterable(map(compat.layer_specs, specs)):
        supported = type(layer) in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
        if not supported or getattr(layer, "non_causal", False):
            raise Incompatible(f"kvstore does not support {type(layer).__name__} KV groups yet")
        if compat.keeps_scales_elsewhere(layer):
            raise Incompatible(
                "scales of this engine's KV are computed at run time, but are not in its blocks; "
                "use another --kv-cache-dtype, or vLLM 0.30 or newer"
            )
    sizes = {spec.block_size for spec in specs} | {compat.hash_block_size(kv_cache_config)}
    if len(sizes - {None}) != 1:
        raise Incompatible(f"kvstore needs one block size for all KV groups, not {sizes}")


def has_heads(kv_cache_config: KVCacheConfig) -> bool:
    """Say whether all KV of an engine is cut by heads between its tensor-parallel workers: latent
    attention has none, and each worker holds it whole."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    layers = chain.from_iterable(map(compat.layer_specs, specs))
    return not any(isinstance(layer, MLAAttentionSpec) for layer in layers)


def build_namespace(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    *,
    stages: Sequence[Stage],
    salted: bool = False,
    head_shards: int = 0,
) -> Namespace:
    """Describe the KV of one engine, but for its weights.

    stages: what the workers of each pipeline stage hold, one without pipeline parallelism. If
    records are lossy, the fine parts are groups of their own, behind all others. salted: requests
    without a cache salt bypass the cache. head_shards: of every block, whatever the degree of
    tensor parallelism, and the sizes in `stages` are of one shard; 0: as many as there are workers
    that hold different heads. Raises Incompatible if the stages do not fit together.
    """
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    shards = head_shards or tensor_parallel // compat.kv_tp_replicas(kv_cache_config)
    stored = stored_groups(stages)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = tuple(
        Group(
            each.name,
            stages[each.stage].record_nbytes[each.at],
            _window_tokens(specs[each.table]),
            shards,
            varies=bool(stages[each.stage].coded),
        )
        for each in stored
    )
    lossy = [stages[each.stage].lossy[each.at] for each in stored if stages[each.stage].lossy]
    cache = vllm_config.cache_config
    identity = {
        "engine": "vllm",
        "model": _model_identity(vllm_config.model_config),
        "kv_dtype": f"{cache.cache_dtype}/{vllm_config.model_config.dtype}",
        "page": compat.PAGE_LAYOUT,
        **_of_stages(stages),
    }
    identity.update([_cut(tensor_parallel, shards, head_shards)])
    if salted:
        identity.update([SALTED])
    extra = vllm_config.load_config.model_loader_extra_config
    if extra:
        identity["load"] = _digest([str(extra)])
    draft = _draft(vllm_config)
    if draft is not None:
        identity["draft"] = _model_identity(draft)
    return Namespace(
        block_tokens=specs[0].block_size,
        groups=groups + fine_groups(groups, lossy),
        identity=tuple(sorted(identity.items())),
        fidelity="ep" if lossy else "exact",
        name=model_name(vllm_config.model_config.model),
    )


def _of_stages(stages: Sequence[Stage]) -> dict[str, str]:
    """Return what the identity says of which layers are where, and how they are packed."""
    layers = [list(map(list, stage.layers)) for stage in stages]
    told = {
        "backends": ",".join(sorted({name for stage in stages for name in stage.backends})),
        "layers": _digest(layers[0] if len(stages) == 1 else layers),
    }
    if len(stages) > 1:
        told[PIPELINE] = "+".join(str(sum(map(len, stage))) for stage in layers)
    if any(stage.coded for stage in stages):
        told["record"] = " | ".join(stage.coded for stage in stages)
    return told


def _cut(tensor_parallel: int, shards: int, head_shards: int) -> tuple[str, str]:
    """Return what the identity says of how blocks are cut by heads."""
    if head_shards:
        return "head_shards", str(head_shards)
    # What every worker holds is the same for every degree.
    return "tensor_parallel", str(tensor_parallel if shards > 1 else 1)


def fine_groups(groups: Sequence[Group], lossy: Sequence[LossySizes]) -> tuple[Group, ...]:
    """Return the groups of the fine parts of `groups`; none if their records are exact."""
    return tuple(
        replace(
            groups[index],
            name=f"{index}.fine",
            record_nbytes=sizes.fine_nbytes,
            varies=False,
            refines=index,
            base_nbytes=sizes.base_nbytes,
        )
        for index, sizes in enumerate(lossy)
    )


def weights_sources(vllm_config: Any, weights_id: str = "") -> dict[str, Source]:
    """Return what tells the weights of one engine, by their names in the namespace.

    weights_id: names those in the model's folder, and nothing else. Raises Incompatible, saying
    what to type, if the files on this machine do not tell them.
    """
    sources: dict[str, Source] = {
        "weights": weights_id or _weights(vllm_config, vllm_config.model_config)
    }
    draft = _draft(vllm_config)
    if draft is not None:
        # Layers of a drafter live in the same groups: other drafts, other bytes.
        sources["draft_weights"] = _weights(vllm_config, draft)
    quantization = _quantization_file(vllm_config.model_config)
    if quantization is not None:
        sources["quantization_file"] = [quantization]
    return sources


class PendingNamespace:
    """A namespace that waits for the weights to be known."""

    def __init__(self, unnamed: Namespace, sources: Mapping[str, Source]) -> None:
        """Begin to hash the weights; see `Fingerprints`."""
        self._unnamed = unnamed
        self._fingerprints = Fingerprints(sources)

    def poll(self) -> Namespace | None:
        """Return the namespace; None: not yet, or never, as the log says."""
        found = self._fingerprints.found
        if found is None:
            return None
        identity = {**dict(self._unnamed.identity), **found}
        return replace(self._unnamed, identity=tuple(sorted(identity.items())))


def _draft(vllm_config: Any) -> Any:
    """Return the configuration of a drafter with weights of its own, or None."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return draft if draft is not None and draft.model != vllm_config.model_config.model else None


def _window_tokens(spec: Any) -> int:
    """Return how many trailing tokens a group keeps, 0 for all.

    A full-attention spec may name a window too (hybrid manager off): its blocks are kept anyway.
    """
    layers = compat.layer_specs(spec)
    windows = [
        layer.sliding_window + layer.extra_retained_tokens
        for layer in layers
        if isinstance(layer, SlidingWindowSpec)
    ]
    return max(windows, default=0)


def _model_identity(model: Any) -> str:
    """Return a digest of the model's configuration with all overrides applied."""
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    rope = json.dumps(config, default=str)
    if "longrope" in rope or "dynamic" in rope:
        config["max_model_len"] = model.max_model_len  # these scale positions by it
    config["quantization"] = model.quantization
    online = compat.online_quantization(model)
    if online is not None:
        config["online_quantization"] = online
    return _digest(config)


def _quantization_file(model: Any) -> Path | None:
    """Return the file outside the model's folder that tells how its weights are quantized."""
    overrides = getattr(model, "hf_overrides", None)
    named = overrides.get("quantization_config_file") if isinstance(overrides, Mapping) else None
    if named is None:
        return None
    file = Path(named)
    if not file.is_file() or not os.access(file, os.R_OK):
        raise Incompatible(
            f"cannot read {file}, the quantization_config_file of --hf-overrides, which decides "
            "what the weights are; give each host of the engine a file that it may read"
        )
    return file


def _weights(vllm_config: Any, model: Any) -> Source:
    load = vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy seed {model.seed}"
    if str(load.load_format) not in _READ_FROM_FILES:
        raise Incompatible(
            f"what --load-format {load.load_format} loads cannot be told from files; {NAME_THEM}"
        )
    elsewhere = [
        name
        for name, value in model.hf_config.to_dict().items()
        if name.endswith("_model_id") and value
    ]
    if elsewhere:
        raise Incompatible(
            f"{model.model} loads a part of its weights from another model ({elsewhere[0]}); "
            f"{NAME_THEM}"
        )
    return weights_files(_model_path(model, load))


def _model_path(model: Any, load: Any) -> Path:
    """Return where the weights of `model` lie on this machine."""
    from vllm import envs

    return model_path(
        str(getattr(model, "model_weights", "") or model.model),
        revision=model.revision,
        folder=load.download_dir,
        advice=NAME_THEM,
        hub=not getattr(envs, "VLLM_USE_MODELSCOPE", False),
    )


def _digest(value: Mapping[str, object] | list[Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
