"""What the connector uses of vLLM, by file and class; its facts at one version are beside this.

    python -m tests.connectors.vllm.contract FOLDER VERSION

prints the facts of the vLLM whose sources lie in FOLDER (an unpacked wheel is enough).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.connectors.signatures import gather, to_text

FACTS = Path(__file__).with_name("vllm_0_33.json")

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
BASE = f"{_V1}/base.py"
METRICS = f"{_V1}/metrics.py"
SPECS = "vllm/v1/kv_cache_interface.py"
STEP = "vllm/v1/core/sched/output.py"
TIER = "vllm/v1/kv_offload/tiering"
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"

WANTED: dict[str, dict[str, list[str]]] = {
    BASE: {"classes": ["KVConnectorBase_V1", "KVConnectorTransferResults", "SupportsHMA"]},
    METRICS: {"classes": ["KVConnectorPromMetrics", "KVConnectorStats"]},
    FACTORY: {"classes": ["KVConnectorFactory"]},
    SPECS: {
        "classes": [
            "FullAttentionSpec",
            "KVCacheConfig",
            "KVCacheGroupSpec",
            "MLAAttentionSpec",
            "SlidingWindowSpec",
            "UniformTypeKVCacheSpecs",
        ]
    },
    STEP: {"classes": ["CachedRequestData", "NewRequestData", "SchedulerOutput"]},
    "vllm/config/kv_transfer.py": {"classes": ["KVTransferConfig"]},
    "vllm/distributed/parallel_state.py": {
        "classes": [],
        "functions": [
            "get_pcp_group",
            "get_pp_group",
            "get_tensor_model_parallel_rank",
            "get_tp_group",
        ],
    },
    "vllm/lora/request.py": {"classes": ["LoRARequest"]},
    "vllm/v1/core/kv_cache_manager.py": {"classes": ["KVCacheBlocks", "KVCacheManager"]},
    "vllm/v1/kv_offload/base.py": {
        "classes": ["LookupResult", "Medium", "RequestOffloadingContext"],
        "functions": ["get_offload_group_idx"],
    },
    f"{TIER}/async_lookup.py": {"classes": ["AsyncLookupManager"]},
    f"{TIER}/base.py": {"classes": ["JobResult", "SecondaryTierManager", "TransferJob"]},
    f"{TIER}/factory.py": {"classes": ["SecondaryTierFactory"]},
    "vllm/v1/metrics/cache_hit_source.py": {"classes": ["CacheHitSource"]},
    "vllm/v1/outputs.py": {"classes": ["KVConnectorOutput"]},
    "vllm/v1/request.py": {"classes": ["Request"]},
}

FIELDS: dict[str, list[str]] = {
    f"{BASE}:KVConnectorBase_V1": ["_cache_hit_source", "_kv_cache_config", "_vllm_config"],
    f"{BASE}:KVConnectorTransferResults": ["failed_recving", "finished_recving"],
    f"{FACTORY}:KVConnectorFactory": ["_registry"],
    f"{METRICS}:KVConnectorStats": ["data"],
    f"{SPECS}:FullAttentionSpec": ["block_size", "head_size", "head_size_v", "non_causal"],
    f"{SPECS}:KVCacheConfig": [
        "hash_block_size",
        "kv_cache_groups",
        "kv_cache_layout",
        "kv_tp_replicas",
        "num_blocks",
    ],
    f"{SPECS}:KVCacheGroupSpec": ["kv_cache_spec", "layer_names"],
    f"{SPECS}:SlidingWindowSpec": ["block_size", "extra_retained_tokens", "sliding_window"],
    f"{SPECS}:UniformTypeKVCacheSpecs": ["kv_cache_specs"],
    f"{STEP}:CachedRequestData": [
        "new_block_ids",
        "num_computed_tokens",
        "req_ids",
        "resumed_req_ids",
    ],
    f"{STEP}:NewRequestData": ["block_ids", "num_computed_tokens", "req_id"],
    f"{STEP}:SchedulerOutput": [
        "num_scheduled_tokens",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    ],
    "vllm/config/kv_transfer.py:KVTransferConfig": [
        "engine_id",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
    ],
    "vllm/lora/request.py:LoRARequest": ["load_inplace", "lora_int_id", "lora_name", "lora_path"],
    "vllm/v1/kv_offload/base.py:LookupResult": ["HIT", "MISS", "RETRY"],
    "vllm/v1/kv_offload/base.py:Medium": ["STORAGE"],
    f"{TIER}/base.py:JobResult": ["job_id", "success", "successful_keys"],
    f"{TIER}/base.py:TransferJob": ["chunk_ids", "job_id", "keys", "req_context"],
    f"{TIER}/factory.py:SecondaryTierFactory": ["_registry"],
    "vllm/v1/metrics/cache_hit_source.py:CacheHitSource": ["HOST"],
    "vllm/v1/outputs.py:KVConnectorOutput": [
        "failed_recving",
        "invalid_block_ids",
        "kv_connector_worker_meta",
    ],
    "vllm/v1/request.py:Request": [
        "all_token_ids",
        "cache_salt",
        "kv_transfer_params",
        "lora_request",
        "mm_features",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prompt_embeds",
        "request_id",
        "resumable",
        "skip_reading_prefix_cache",
        "status",
    ],
}
"""Attributes that the connector reads or sets."""

METHODS: dict[str, dict[str, list[str]]] = {
    f"{BASE}:KVConnectorBase_V1": {
        "_get_connector_metadata": [],
        "bind_kv_cache_manager": ["kv_cache_manager"],
    },
    f"{FACTORY}:KVConnectorFactory": {"register_connector": ["name", "module_path", "class_name"]},
    f"{SPECS}:KVCacheConfig": {"needs_kv_cache_zeroing": []},
    f"{TIER}/async_lookup.py:AsyncLookupManager": {
        "cleanup": ["req_id"],
        "flush": [],
        "lookup": ["key", "req_context"],
        "mark_miss": ["keys"],
        "shutdown": [],
    },
    f"{TIER}/factory.py:SecondaryTierFactory": {
        "register_tier": ["tier_type", "module_path", "class_name"]
    },
    "vllm/config/kv_transfer.py:KVTransferConfig": {"is_kv_consumer": [], "is_kv_producer": []},
    "vllm/v1/core/kv_cache_manager.py:KVCacheBlocks": {"get_block_ids": []},
    "vllm/v1/core/kv_cache_manager.py:KVCacheManager": {
        "get_block_ids": ["request_id"],
        "get_computed_blocks": ["request"],
    },
    "vllm/v1/request.py:Request": {"num_tokens": []},
}
"""Methods that the connector calls, and with what; properties are methods here."""


WHOLE = (f"{BASE}:KVConnectorBase_V1", f"{METRICS}:", f"{TIER}/base.py:SecondaryTierManager")
"""Classes of which everything is kept, because the connector derives from them."""


def read(folder: Path) -> dict[str, Any]:
    """Return the facts of the vLLM in a folder, as far as the connector uses them."""
    found = gather(folder, WANTED)
    for name, each in found.items():
        if isinstance(each, dict) and not name.startswith(WHOLE):
            used = METHODS.get(name, {})
            each["fields"] = [field for field in each["fields"] if field in FIELDS.get(name, [])]
            each["methods"] = {key: each["methods"][key] for key in each["methods"] if key in used}
    return found


def facts() -> dict[str, Any]:
    """Return the facts of the version that is kept: its number, and the classes."""
    found: dict[str, Any] = json.loads(FACTS.read_text())
    return found


def main() -> None:
    print(to_text({"version": sys.argv[2], "facts": read(Path(sys.argv[1]))}))


if __name__ == "__main__":
    main()
