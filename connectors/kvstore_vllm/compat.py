"""What differs between the versions of vLLM this connector runs on: 0.28 to 0.33.

Found by looking for the feature, never by comparing version numbers. No other file here names
anything that one of these versions lacks.

Before 0.30 vLLM learns of a failed load by its device blocks, which it can tell apart in engines
with one KV cache group only. There the connector does not say that it supports hybrid KV caches, so
vLLM puts all layers in one group, and names the first block of a failed load, where vLLM truncates
the request. Nor is the scheduler's KV cache manager known: blocks the engine holds itself are
looked up in the cache too, and blocks whose tokens become final late are not saved.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from kvstore.model.errors import Incompatible
from kvstore.system.engine_versions import check_tested

TESTED = ("0.28", "0.30", "0.32", "0.33")
"""Those between two of them are taken as well. There is no 0.33 for the CPU: what the connector
uses of it is compared by signatures."""

FAILS_BY_REQUEST = hasattr(base, "KVConnectorTransferResults")
STANDARD_LAYOUTS = "kv_cache_layout" in KVCacheConfig.__dataclass_fields__


class _OneGroup:
    """Instead of SupportsHMA: have vLLM put all layers in one KV cache group."""


HybridSupport: Any = base.SupportsHMA if FAILS_BY_REQUEST else _OneGroup

PAGE_LAYOUT = "HNC" if STANDARD_LAYOUTS else "HNC before standard layouts"
"""Part of the namespace: pages of engines from before and after are not known to be alike."""


def check_release(*, allow_untested: bool) -> None:
    """Raise Incompatible, with the list of known versions, for a vLLM that is none of them."""
    check_tested(
        "vLLM",
        str(vllm.__version__),
        TESTED,
        allow_untested=allow_untested,
        allow='add "allow_untested": true to kv_connector_extra_config',
        between=True,
    )


def check_version(kv_cache_config: KVCacheConfig) -> None:
    """Raise Incompatible, saying what to do, if this vLLM cannot serve such an engine."""
    if not hasattr(base.KVConnectorBase_V1, "requires_kv_delivery"):
        raise Incompatible("kvstore needs vLLM 0.28 or newer")
    if not FAILS_BY_REQUEST and len(kv_cache_config.kv_cache_groups) > 1:
        raise Incompatible(
            "this vLLM cannot recompute a failed load in an engine with several KV cache groups; "
            "use vLLM 0.30 or newer, or add --disable-hybrid-kv-cache-manager"
        )


def check_head_shards(head_shards: int) -> None:
    """Raise Incompatible if blocks shall be cut by heads, and where heads lie is not known."""
    if head_shards and not STANDARD_LAYOUTS:
        raise Incompatible('"head_shards" needs vLLM 0.30 or newer; leave it out')


def check_sleep_mode(model_config: Any) -> None:
    """Raise Incompatible if an engine may sleep, and its vLLM would not tell the connector. With
    the cumem allocator, an engine sleeps when it is told to, whatever it was started for."""
    if hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        return
    for field in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(model_config, field, False):
            raise Incompatible(
                "this vLLM does not tell a connector that it unmaps the KV cache to sleep, so a "
                f"save might read it then; use vLLM 0.33 or newer, or drop "
                f"--{field.replace('_', '-')}"
            )


def hash_block_size(kv_cache_config: KVCacheConfig) -> int | None:
    """Return the tokens per block hash if it may differ from the block size, else None."""
    size: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return size


def kv_tp_replicas(kv_cache_config: KVCacheConfig) -> int:
    """Return how many ranks are known to hold the same KV; where unknown, each stores its own."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers: one, if they are alike."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def keeps_scales_elsewhere(spec: Any) -> bool:
    """Say whether the KV of a layer has scales that are computed with it, but are not in its blocks
    as far as its spec tells: a block alone would not be the KV."""
    computed = getattr(getattr(spec, "kv_quant_mode", None), "is_per_token_head", False)
    return bool(computed) and getattr(spec, "state_content_bytes", None) is None


def online_quantization(model_config: Any) -> dict[str, Any] | None:
    """Return the fields of --quantization-config, which also hold what a shorthand stands for; None
    where there is none, or where this vLLM has no such argument."""
    found = getattr(model_config, "quantization_config", None)
    return found if found is None or isinstance(found, dict) else asdict(found)


def cache_hit_source() -> Any:
    """Return how vLLM's metrics shall call our hits; None where they do not tell (before 0.32)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def transfer_results(loaded: set[str], failed: set[str]) -> Any:
    """Return what get_transfer_results answers, where it is asked."""
    return base.KVConnectorTransferResults(finished_recving=loaded | failed, failed_recving=failed)
