"""What the connector uses of TensorRT-LLM, by file and class; the facts are beside this.

    python -m tests.connectors.trtllm.contract FOLDER VERSION

prints the facts of the TensorRT-LLM whose sources lie in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.connectors.signatures import gather, to_text
from tests.connectors.trtllm.standin import CONNECTOR

ARGUMENTS = "tensorrt_llm/llmapi/llm_args.py"
WANTED: dict[str, dict[str, list[str]]] = {
    CONNECTOR: {
        "classes": [
            "KvCacheConnectorScheduler",
            "KvCacheConnectorWorker",
            "RequestData",
            "SchedulerOutput",
        ]
    },
    ARGUMENTS: {"classes": ["KvCacheConfig", "KvCacheConnectorConfig", "TorchLlmArgs"]},
    "tensorrt_llm/_utils.py": {"classes": [], "functions": ["mpi_allgather", "mpi_rank"]},
}
OPTIONS = {
    f"{ARGUMENTS}:KvCacheConfig": [
        "dtype",
        "enable_block_reuse",
        "enable_partial_reuse",
        "host_cache_size",
        "max_attention_window",
        "tokens_per_block",
        "use_kv_cache_manager_v2",
    ],
    f"{ARGUMENTS}:KvCacheConnectorConfig": [
        "connector_module",
        "connector_scheduler_class",
        "connector_worker_class",
    ],
    f"{ARGUMENTS}:TorchLlmArgs": [
        "attn_backend",
        "checkpoint_format",
        "checkpoint_loader",
        "context_parallel_size",
        "dtype",
        "enable_attention_dp",
        "kv_cache_config",
        "load_format",
        "max_beam_width",
        "model",
        "model_kwargs",
        "orchestrator_type",
        "pipeline_parallel_size",
        "revision",
        "sparse_attention_config",
        "speculative_config",
        "tensor_parallel_size",
    ],
}
"""Options that the connector reads."""


def main() -> None:
    found = gather(Path(sys.argv[1]), WANTED)
    for name, used in OPTIONS.items():
        found[name]["fields"] = [each for each in found[name]["fields"] if each in used]
        found[name]["methods"] = {}
    print(to_text({"version": sys.argv[2], "facts": found}))


if __name__ == "__main__":
    main()
