"""LMCache's storage manager, as its daemon runs it: pinned DRAM (L1) over a folder of files (L2).

Records go through L1 both ways, so a put and a get are a copy each, as between L1 and a device. L2
may be something else: `lmcache_kvstore`, `lmcache_s3` and `lmcache_valkey`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    get_l2_adapter_config_class,
)
from lmcache.v1.distributed.storage_manager import StorageManager

from kvstore_bench.peers.system import Place, System

WAIT_S = 60.0
POLL_S = 0.0005
MODEL = "bench"


def open_system(place: Place) -> System:
    files = {
        "type": "fs_native",
        "base_path": str(place.directory),
        "num_workers": place.threads,
    }
    return Manager(place, files)


class Manager:
    """L1 holds two rounds and a half. adapter: of L2, as LMCache's command line takes it. model:
    the name of the model whose KV the blocks are said to be."""

    def __init__(self, place: Place, adapter: dict[str, Any], model: str = MODEL) -> None:
        self._model = model
        torch.set_num_threads(1)  # a copy of one block is not worth a team of threads
        self._blocks = place.blocks
        self._layout = MemoryLayoutDesc([torch.Size([place.blocks.nbytes])], [torch.uint8])
        self._rows = torch.frombuffer(place.blocks.mapping, dtype=torch.uint8).view(
            2 * place.blocks.count, place.blocks.nbytes
        )
        memory = L1MemoryManagerConfig(
            size_in_bytes=5 * place.round_nbytes // 2, use_lazy=False, shm_name=""
        )
        below = get_l2_adapter_config_class(adapter["type"]).from_dict(adapter)
        self._manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=L2AdaptersConfig([below]),
            )
        )
        self._put_nbytes = 0

    def put(self, keys: Sequence[bytes]) -> None:
        named = object_keys(keys, self._model)
        reserved = self._manager.reserve_write(named, self._layout)
        if len(reserved) != len(named):
            raise OSError(f"room for {len(reserved)} of {len(named)} blocks")
        for key, row in zip(named, self._rows, strict=False):
            reserved[key].tensor.copy_(row)
        self._manager.finish_write(named)
        self._put_nbytes += len(keys) * self._blocks.nbytes

    def flush(self) -> None:
        """Wait until L2 has taken it. Nothing is synced."""
        deadline = time.monotonic() + WAIT_S
        adapter = self._manager.l2_adapters()[0][1]
        while adapter.get_usage().total_bytes_used < self._put_nbytes:
            if time.monotonic() > deadline:
                raise OSError("L2 did not take everything")
            time.sleep(POLL_S)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        named = object_keys(keys, self._model)
        task = self._manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(named, 0, self._layout)]), skip_l2=False
        )
        if not self._manager.wait_prefetch_status(task, WAIT_S):
            raise OSError("the blocks did not come up in time")
        status = self._manager.query_prefetch_status(task)
        hit = sum(row.popcount() for row in status.hit_cells)
        there = named[:hit]
        if there:
            with self._manager.read_prefetched_results(there) as records:
                targets = self._rows[self._blocks.count :]
                for record, target in zip(records, targets, strict=False):
                    target.copy_(record.tensor.view(-1))
            self._manager.finish_read_prefetched(there)
        return [index < hit for index in range(len(keys))]

    def settle(self) -> None:
        """Nothing to ask for: the page cache is written by whoever syncs the files."""

    def forget(self) -> None:
        """Drop what is in L1: the next get comes from L2, wherever that has it."""
        self._manager.clear(force=True)

    def chill(self) -> bool:
        self.forget()
        return True

    def close(self) -> None:
        self._manager.close()


def object_keys(keys: Sequence[bytes], model: str = MODEL) -> list[ObjectKey]:
    return [ObjectKey(chunk_hash=key, model_name=model, kv_rank=0) for key in keys]
