"""LMCache's storage manager as its server runs it, with eviction of L2 switched on:
`python in_server.py TARGET` prints JSON.

Run in a process of its own, because LMCache needs a folder of packages of its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from argparse import Namespace
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
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

from kvstore.testing.wait import until

NBYTES, COUNT = 1 << 20, 40
CAPACITY_GB = 32 / 1024  # of 32 pages
WATERMARK = 0.8
WAIT_S = 60.0


def adapter_of(target: str) -> dict[str, Any]:
    return {
        "type": "native_plugin",
        "module_path": "kvstore_lmcache",
        "class_name": "Client",
        "adapter_params": {
            "target": target,
            "page_mib_max": 4,
            "lookup_deadline_s": 10,
            "weights_id": "the tests' own",
        },
        "max_capacity_gb": CAPACITY_GB,
        "eviction": {
            "eviction_policy": "LRU",
            "trigger_watermark": WATERMARK,
            "eviction_ratio": 0.2,
        },
    }


class Server:
    """The storage manager, over one L2."""

    def __init__(self, target: str) -> None:
        below = parse_args_to_l2_adapters_config(
            Namespace(l2_adapter=[json.dumps(adapter_of(target))])
        )
        memory = L1MemoryManagerConfig(size_in_bytes=128 << 20, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=below,
            )
        )
        self.layout = MemoryLayoutDesc([torch.Size([NBYTES])], [torch.uint8])
        ((_, self.adapter),) = self.manager.l2_adapters()
        self.counters = self.adapter._client.counters

    def put(self, keys: list[ObjectKey]) -> None:
        reserved = self.manager.reserve_write(keys, self.layout)
        for key in keys:
            reserved[key].tensor.copy_(value_of(key))
        self.manager.finish_write(keys)

    def get(self, key: ObjectKey) -> torch.Tensor | None:
        """Return a page that comes from L2; None if it is not there."""
        self.manager.clear(force=True)
        task = self.manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys([key], 0, self.layout)]), skip_l2=False
        )
        assert self.manager.wait_prefetch_status(task, WAIT_S)
        if not sum(row.popcount() for row in self.manager.query_prefetch_status(task).hit_cells):
            return None
        with self.manager.read_prefetched_results([key]) as records:
            found = next(iter(records)).tensor.view(-1).clone()
        self.manager.finish_read_prefetched([key])
        return found

    @property
    def used(self) -> float:
        return float(self.adapter.get_usage().usage_fraction)


def value_of(key: ObjectKey) -> torch.Tensor:
    draw = torch.Generator().manual_seed(int.from_bytes(key.chunk_hash, "big"))
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=draw)


def main(target: str) -> dict[str, Any]:
    server = Server(target)
    until(lambda: server.adapter._client._client.instance)
    keys = [ObjectKey(bytes([0, at + 1]), "org/model", 0) for at in range(COUNT)]
    server.put(keys)
    until(lambda: server.counters.as_dict()["saved"] == COUNT, WAIT_S)
    until(lambda: server.counters.as_dict()["deleted"] and server.used < WATERMARK, WAIT_S)
    said: dict[str, Any] = {"used": server.used, "deleted": server.counters.as_dict()["deleted"]}
    found = [server.get(key) for key in keys]
    said["found"] = sum(each is not None for each in found)
    said["same"] = sum(
        each is not None and torch.equal(each, value_of(key))
        for key, each in zip(keys, found, strict=True)
    )
    gone = [key for key, each in zip(keys, found, strict=True) if each is None][:2]
    server.put(gone)
    until(lambda: server.counters.as_dict()["saved"] == COUNT + 2, WAIT_S)
    said["again"] = [server.get(key) is not None for key in gone]
    said["failed"] = server.counters.as_dict()["failed"]
    server.manager.close()
    return said


if __name__ == "__main__":
    try:
        print(json.dumps(main(sys.argv[1])), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # LMCache's threads would go on
    os._exit(0)
