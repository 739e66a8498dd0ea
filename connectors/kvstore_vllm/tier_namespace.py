"""What makes the chunks of one engine's tier not interchangeable with another's, as far as vLLM
tells its tiers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.model.block import Group, Namespace
from kvstore.model.errors import Incompatible
from kvstore.model.names import model_name
from kvstore_vllm.fingerprint import Source, weights_files


def tier_weights(config: Any, weights_id: str) -> Source:
    """Return what tells the weights. Raises Incompatible if nothing on this machine does."""
    model = Path(config.model.name)
    if not weights_id and not model.is_dir():
        raise Incompatible(
            f"{config.model.name} is not a directory of this machine, so its weights cannot be "
            "told from others; name them in the tier's configuration, e.g. "
            '"weights_id": "my-model-v3"'
        )
    return weights_id or weights_files(model)


def tier_namespace(spec: Any, chunk_nbytes: int, fingerprints: Mapping[str, str]) -> Namespace:
    """Describe the chunks of one engine, as its weights were at its start."""
    config = spec.config
    model, parallel = Path(config.model.name), config.parallel
    shape = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    identity = {
        "engine": "vllm offloading",
        **fingerprints,
        "config": _config_digest(model),
        "kv_dtype": str(config.model.dtype),
        "layout": f"{config.kv_cache_layout} canonical={config.canonical_layout}",
        "replicated": str(config.replicated_layout),
        "groups": _digest(str([(g.tokens_per_block, g.layer_names) for g in config.groups])),
        "parallel": "x".join(map(str, shape)),
        "hash_tokens": str(config.cache.tokens_per_hash),
    }
    return Namespace(
        block_tokens=spec.tokens_per_block[0] * spec.blocks_per_chunk,
        groups=(Group("chunk", chunk_nbytes),),
        identity=tuple(sorted(identity.items())),
        name=model_name(config.model.name),
    )


def _config_digest(model: Path) -> str:
    file = model / "config.json"
    return _digest(file.read_text()) if file.is_file() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
