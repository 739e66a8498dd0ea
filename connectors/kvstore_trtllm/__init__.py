"""kvstore for TensorRT-LLM: a KV cache connector of its PyTorch back end. Not run on a GPU yet.

    kv_connector_config:
      connector_module: kvstore_trtllm
      connector_scheduler_class: KVStoreScheduler
      connector_worker_class: KVStoreWorker

`scheduler` decides what is loaded and saved, `worker` moves the bytes. Read `scheduler.py` first.
Each is imported on first use, because both need TensorRT-LLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_trtllm.scheduler import KVStoreScheduler
    from kvstore_trtllm.worker import KVStoreWorker

__all__ = ["KVStoreScheduler", "KVStoreWorker"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreScheduler":
        from kvstore_trtllm.scheduler import KVStoreScheduler

        return KVStoreScheduler
    if name == "KVStoreWorker":
        from kvstore_trtllm.worker import KVStoreWorker

        return KVStoreWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
