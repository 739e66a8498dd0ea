"""SGLang's tree cache with its controller and our storage, built by SGLang's own test kit.

The kit makes a tree, its pools and its controller, inserts prefixes, backs them up and prefetches
them. It wants a GPU for two things, which are replaced here: pinned memory, and the copies between
device and host memory.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

CHUNK_TOKENS = 64


def to_host(pool: Any, device_pool: Any, host: Any, device: Any, io_backend: str) -> None:
    """Copy rows of all layers of a device pool to host memory, in place of a GPU's kernel."""
    rows = zip(pool.device_k_buffers, pool.device_v_buffers, strict=True)
    for layer, (keys, values) in enumerate(rows):
        pool.k_data_refs[layer][host.cpu()] = keys[device.cpu()]
        pool.v_data_refs[layer][host.cpu()] = values[device.cpu()]


def to_device(pool: Any, _: Any, host: Any, device: Any, *rest: Any, **more: Any) -> None:
    layer = rest[0]
    if layer >= len(pool.device_k_buffers):
        return
    pool.device_k_buffers[layer][device.cpu()] = pool.k_data_refs[layer][host.cpu()]
    pool.device_v_buffers[layer][device.cpu()] = pool.v_data_refs[layer][host.cpu()]


class Steps(UnifiedRadixCacheStorageFixtures, CustomTestCase):  # type: ignore[misc]
    """The kit's steps on trees whose storage is a daemon of ours."""

    __test__ = False  # pytest takes it for a test

    def __init__(self, cfg: Any, target: str, layout: str, weights: str) -> None:
        super().__init__("runTest")
        self.cfg, self.target, self.layout, self.weights = cfg, target, layout, weights
        self._replace(fixtures, "get_device", lambda: "cpu")
        self._replace(common, "_cuda_host_register", lambda *_: None)
        self._replace(common, "_cuda_host_unregister", lambda *_: None)
        self._replace(MHATokenToKVPoolHost, "backup_from_device_all_layer", to_host)
        self._replace(MHATokenToKVPoolHost, "load_to_device_per_layer", to_device)
        self._enter(host_memory_budget_scope(1 << 30))
        self._enter(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))

    def runTest(self) -> None:  # noqa: N802 - unittest's name
        """Steps are taken by the tests."""

    def _enter(self, manager: Any) -> None:
        manager.__enter__()
        self.addCleanup(manager.__exit__, None, None, None)

    def _replace(self, where: Any, name: str, by: Any) -> None:
        self._enter(mock.patch.object(where, name, by))

    def _init_hicache(self, cache: Any, **options: Any) -> None:
        """As the kit does, but with our storage."""
        extra = {
            "backend_name": "kvstore",
            "module_path": "kvstore_sglang",
            "class_name": "Storage",
            "interface_v1": 1,
            "prefetch_threshold": 1,
            "hicache_storage_pass_prefix_keys": True,
            "target": self.target,
            "weights": self.weights,
            "lookup_deadline_s": 10,
        }
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="kernel",
            hicache_mem_layout=self.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy=options.get("prefetch_policy", "wait_complete"),
        )
        arguments._mamba_cache_chunk_size = max(CHUNK_TOKENS, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size
        self.addCleanup(controller.storage_backend.close)
        self.addCleanup(controller._stop_storage_threads)

    def fill(self, allocator: Any, indices: torch.Tensor) -> None:
        """Put bytes of their own into rows of all layers of the KV pool."""
        pool = self._get_full_kv_pool(allocator)
        generator = torch.Generator().manual_seed(len(indices))
        for buffers in (pool.k_buffer, pool.v_buffer):
            for layer in buffers:
                rows = torch.randn(layer[indices].shape, generator=generator)
                layer[indices] = rows.to(layer.dtype)

    def rows(self, allocator: Any, indices: torch.Tensor) -> list[torch.Tensor]:
        pool = self._get_full_kv_pool(allocator)
        return [layer[indices].clone() for each in (pool.k_buffer, pool.v_buffer) for layer in each]
