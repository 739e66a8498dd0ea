"""LMCache as in an engine, but without one: `python in_engine.py TARGET PID MODEL` prints JSON.

Run in a process of its own, because LMCache needs a folder of packages of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.storage_manager import StorageManager

from kvstore.testing.wait import until

TOKENS, LAYERS, HIDDEN = 256, 2, 64
SHAPE = torch.Size((2, LAYERS, TOKENS, HIDDEN))
COUNT = 24


def config_of(target: str, **settings: Any) -> LMCacheEngineConfig:
    prefix = "remote_storage_plugin.kvstore"
    return LMCacheEngineConfig.from_dict(
        {
            "chunk_size": TOKENS,
            "local_cpu": False,
            "max_local_cpu_size": 0.1,
            "remote_storage_plugins": ["kvstore"],
            "remote_serde": "naive",
            "extra_config": {
                f"{prefix}.module_path": "kvstore_lmcache",
                f"{prefix}.class_name": "Adapter",
                f"{prefix}.target": target,
                f"{prefix}.page_mib_max": 4,
                f"{prefix}.weights_id": "the tests' own",
                f"{prefix}.lookup_deadline_s": 10,  # whatever else runs here
                **{f"{prefix}.{name}": value for name, value in settings.items()},
            },
        }
    )


def metadata_of(
    worker: int = 0, dtype: torch.dtype = torch.float16, model: str = "org/model"
) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name=model,
        world_size=2,
        local_world_size=2,
        worker_id=worker,
        local_worker_id=worker,
        kv_dtype=dtype,
        kv_shape=(LAYERS, 2, TOKENS, 2, HIDDEN // 2),
        chunk_size=TOKENS,
    )


def keys_of(worker: int = 0, **tags: str) -> list[CacheEngineKey]:
    configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
    return [
        CacheEngineKey("org/model", 2, worker, at + 1, torch.float16, configs)
        for at in range(COUNT)
    ]


class Engine:
    """One worker's storage manager."""

    def __init__(
        self,
        target: str,
        dtype: torch.dtype = torch.float16,
        local_cpu: bool = False,
        **settings: Any,
    ) -> None:
        config, self.dtype = config_of(target, **settings), dtype
        config.local_cpu = local_cpu
        self.manager = StorageManager(config, metadata_of(dtype=dtype), EventManager())
        self.backend = self.manager.storage_backends["RemoteBackend-kvstore"]
        self.connector = self.backend.connection.getWrappedConnector()

    def put(self, keys: list[CacheEngineKey], values: list[torch.Tensor]) -> None:
        pages = []
        for value in values:
            page = self.manager.allocate(
                value.shape, self.dtype, MemoryFormat.KV_2LTD, busy_loop=False
            )
            page.tensor.copy_(value)
            pages.append(page)
        before = self.connector.counters.as_dict()
        self.manager.batched_put(keys, pages)
        settled = ("saved", "unnamed", "partial", "away", "failed", "no_room", "late")
        until(
            lambda: (
                sum(self.connector.counters.as_dict()[name] - before[name] for name in settled)
                >= len(keys)
            )
        )

    def get(self, keys: list[CacheEngineKey]) -> list[torch.Tensor | None]:
        found = []
        for page in self.backend.batched_get_blocking(keys):
            found.append(None if page is None else page.tensor.clone())
            if page is not None:
                page.ref_count_down()
        return found

    @property
    def memory_in_use(self) -> int:
        allocator = self.manager.local_cpu_backend.memory_allocator
        return int(allocator.pin_allocator.total_allocated_size)


def same(got: list[torch.Tensor | None], expected: list[torch.Tensor]) -> int:
    return sum(
        each is not None and torch.equal(each, value)
        for each, value in zip(got, expected, strict=True)
    )


def main(target: str, pid: int, model: str) -> dict[str, Any]:
    torch.manual_seed(3)
    values = [torch.randn(SHAPE).to(torch.float16) for _ in range(COUNT)]
    engine, keys, said = Engine(target), keys_of(), {}
    until(lambda: engine.connector._client.available and engine.connector._client.instance)
    held = engine.memory_in_use
    said["missed_at_first"] = engine.get(keys).count(None)
    engine.put(keys[:20], values[:20])
    said["prefix"] = engine.backend.batched_contains(keys)
    said["contains"] = [engine.backend.contains(keys[19]), engine.backend.contains(keys[20])]
    said["exists_sync"] = engine.connector.exists_sync(keys[0])
    said["same"] = same(engine.get(keys[:20]), values[:20])
    page = engine.backend.get_blocking(keys[4])
    said["one"] = same([page.tensor], [values[4]])
    page.ref_count_down()
    said["beyond"] = engine.get(keys)[18:].count(None)
    said["of_another_worker"] = engine.backend.batched_contains(keys_of(worker=1))
    said["of_another_tag"] = engine.backend.batched_contains(keys_of(user="alice"))
    said["removed"] = engine.backend.remove(keys[19])
    said["after_remove"] = engine.backend.batched_contains(keys)
    engine.put(keys[22:23], [torch.zeros((2, LAYERS, TOKENS // 2, HIDDEN), dtype=torch.float16)])
    said["partial"] = engine.connector.counters.as_dict()["partial"]
    said["partial_found"] = engine.backend.contains(keys[22])
    said["folder"] = of_a_folder(target, model, keys[:1])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not engine.connector._client.available)
    said["away"] = [engine.backend.batched_contains(keys), engine.get(keys).count(None)]
    engine.put(keys[:2], values[:2])
    until(lambda: engine.memory_in_use <= held)  # pages are counted before they are given back
    said["leaked"] = engine.memory_in_use - held
    engine.manager.close()
    said["closed"] = after_close(engine.connector, keys[:2])
    said["refused"] = refused(target)
    said["unnamed"] = {
        "weights": unnamed(target, values[0], weights_id=""),
        "dtype": unnamed(target, torch.zeros(SHAPE, dtype=torch.uint8), dtype=torch.uint8),
    }
    return said


def unnamed(target: str, value: torch.Tensor, **settings: Any) -> list[Any]:
    """Return what an engine finds of a page that it stored, whose daemon's pages have no name."""
    engine = Engine(target, local_cpu=True, **settings)
    key = CacheEngineKey("org/model", 2, 0, 1, value.dtype, {})
    engine.put([key], [value])
    below = [engine.backend.contains(key), same(engine.get([key]), [value])]
    page = engine.manager.get(key)
    own = page is not None and torch.equal(page.tensor, value)
    counters, reason = engine.connector.counters.as_dict(), engine.connector._unnamed
    engine.manager.close()
    return [below, own, counters["saved"], counters["unnamed"] > 0, reason]


def of_a_folder(target: str, model: str, keys: list[CacheEngineKey]) -> list[Any]:
    """Return what tells the weights of a model in a folder, and that pages may be asked for."""
    connector = CreateConnector(
        "plugin://kvstore",
        None,
        None,
        config_of(target, weights_id=""),
        metadata_of(model=model),
        "kvstore",
    ).getWrappedConnector()
    until(lambda: connector._weights.identity)
    found = connector.batched_contains(keys)
    asyncio.run(connector.close())
    return [connector._weights.identity, found, connector.counters.as_dict()["looked_up"]]


def after_close(connector: Any, keys: list[CacheEngineKey]) -> list[Any]:
    """Ask as LMCache's threads and its loop do, whose calls a shutdown may overtake."""
    return [
        connector.batched_contains(keys),
        connector.exists_sync(keys[0]),
        connector.remove_sync(keys[0]),
        asyncio.run(connector.batched_async_contains("", keys)),
        asyncio.run(connector.batched_get(keys)),
    ]


def refused(target: str) -> dict[str, str]:
    """Return what is said of what cannot work."""
    said = {}
    tries: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "layerwise": ({}, {"use_layerwise": True}),
        "setting": ({"socket": 1}, {}),
    }
    for name, (settings, changes) in tries.items():
        config = config_of(target, **settings)
        for key, value in changes.items():
            setattr(config, key, value)
        try:
            CreateConnector("plugin://kvstore", None, None, config, metadata_of(), "kvstore")
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


if __name__ == "__main__":
    try:
        print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # LMCache's threads would go on
    os._exit(0)
