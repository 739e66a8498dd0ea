"""LMCache's storage manager, as its daemon runs it: pinned DRAM (L1) over a folder of files (L2).

Records go through L1 both ways, so a put and a get are a copy each, as between L1 and a device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

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
ADAPTER = "fs_native"


def open_system(place: Place) -> System:
    return Manager(place)


class Manager:
    """L1 holds two rounds and a half."""

    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)  # a copy of one block is not worth a team of threads
        self._blocks = place.blocks
        self._layout = MemoryLayoutDesc([torch.Size([place.blocks.nbytes])], [torch.uint8])
        self._rows = torch.frombuffer(place.blocks.mapping, dtype=torch.uint8).view(
            2 * place.blocks.count, place.blocks.nbytes
        )
        memory = L1MemoryManagerConfig(
            size_in_bytes=5 * place.round_nbytes // 2, use_lazy=False, shm_name=""
        )
        files = get_l2_adapter_config_class(ADAPTER).from_dict(
            {"type": ADAPTER, "base_path": str(place.directory), "num_workers": place.threads}
        )
        self._manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=L2AdaptersConfig([files]),
            )
        )
        self._put_nbytes = 0

    def put(self, keys: Sequence[bytes]) -> None:
        named = _named(keys)
        reserved = self._manager.reserve_write(named, self._layout)
        if len(reserved) != len(named):
            raise OSError(f"room for {len(reserved)} of {len(named)} blocks")
        for key, row in zip(named, self._rows, strict=False):
            reserved[key].tensor.copy_(row)
        self._manager.finish_write(named)
        self._put_nbytes += len(keys) * self._blocks.nbytes

    def flush(self) -> None:
        """Wait until L2 has it in files. They are not synced."""
        deadline = time.monotonic() + WAIT_S
        adapter = self._manager.l2_adapters()[0][1]
        while adapter.get_usage().total_bytes_used < self._put_nbytes:
            if time.monotonic() > deadline:
                raise OSError("L2 did not take everything")
            time.sleep(POLL_S)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        named = _named(keys)
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

    def chill(self) -> bool:
        self._manager.clear(force=True)
        return True

    def close(self) -> None:
        self._manager.close()


def _named(keys: Sequence[bytes]) -> list[ObjectKey]:
    return [ObjectKey(chunk_hash=key, model_name="bench", kv_rank=0) for key in keys]
