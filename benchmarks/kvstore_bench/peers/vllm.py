"""vLLM's own file tier: what its offloading keeps below host memory, driven without an engine.

The caller's memory is the tier's primary memory, so nothing is copied beside the I/O. Blocks are
loaded without being looked up first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvstore_bench.peers.system import Place, System

JOB_BLOCKS = 8  # a job is done by one thread


def open_system(place: Place) -> System:
    return FsTier(place)


class FsTier:
    def __init__(self, place: Place) -> None:
        self._blocks = place.blocks
        self._jobs = 0
        self._tier = FileSystemTierManager(
            SimpleNamespace(config=_config(place.blocks.nbytes), blocks_per_chunk=1),
            place.blocks.rows.data,
            "fs",
            str(place.directory),
            # Either kind takes the other's jobs when it has none.
            n_read_threads=-(-place.threads // 2),
            n_write_threads=-(-place.threads // 2),
        )

    def put(self, keys: Sequence[bytes]) -> None:
        if not all(self._move(self._tier.submit_store, keys, first_row=0)):
            raise OSError("the tier could not write every block")

    def flush(self) -> None:
        """Nothing: files are renamed into place, never synced."""

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        return self._move(self._tier.submit_load, keys, first_row=self._blocks.count)

    def chill(self) -> bool:
        return True

    def close(self) -> None:
        self._tier.shutdown()

    def _move(
        self, submit: Callable[[Any], None], keys: Sequence[bytes], *, first_row: int
    ) -> list[bool]:
        named = [make_offload_key(key, 0) for key in keys]
        jobs = {}
        for start in range(0, len(named), JOB_BLOCKS):
            some = named[start : start + JOB_BLOCKS]
            rows = np.arange(first_row + start, first_row + start + len(some))
            self._jobs += 1
            jobs[self._jobs] = some
            submit(
                TransferJob(
                    job_id=self._jobs,
                    keys=some,
                    chunk_ids=rows,
                    is_promotion=first_row > 0,
                    req_context=ReqContext(req_id=str(self._jobs)),
                )
            )
        self._tier.drain_jobs()
        moved: set[bytes] = set()
        for done in self._tier.get_finished_jobs():
            moved.update(jobs[done.job_id] if done.success else done.successful_keys or ())
        return [key in moved for key in named]


def _config(block_nbytes: int) -> OffloadingConfig:
    """One group of one worker: what names the folder."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("all",), group_id=0),),
        worker_kv_bytes_per_block=block_nbytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(name="bench", dtype="uint8"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
