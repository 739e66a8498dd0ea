"""What of TensorRT-LLM this connector stands on. No other file here imports it.

Its wheel needs a GPU, so the connector was written against the sources of one version, whose
signatures a test holds still; it has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import tensorrt_llm
from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
)
from tensorrt_llm._utils import mpi_allgather, mpi_rank

from kvstore.system.engine_versions import check_tested

__all__ = ["KvCacheConnectorScheduler", "KvCacheConnectorWorker", "all_gather", "check_release"]

MADE_FOR = ("1.2.1",)


def check_release(*, allow_untested: bool) -> str:
    """Return the version of TensorRT-LLM. Raises Incompatible, with the list of known ones, for one
    that is none of them."""
    version = str(tensorrt_llm.__version__)
    check_tested(
        "TensorRT-LLM",
        version,
        MADE_FOR,
        allow_untested=allow_untested,
        allow='add "allow_untested": true to TRTLLM_KVSTORE',
    )
    return version


def rank() -> int:
    """Return the number of this process in its engine."""
    return int(mpi_rank())


def all_gather(told: Any) -> list[Any]:
    """Return what every rank of this engine tells, by rank. Each has to ask, and waits for all."""
    return list(mpi_allgather(told))
