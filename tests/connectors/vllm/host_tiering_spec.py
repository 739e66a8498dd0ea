"""vLLM's own tiers on the CPU platform: only its copies between device and host are replaced."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore_bench.demo.native_spec import HostWorker


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's spec without its check for a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = SharedHostWorker(kv_caches, region)
        return self._worker


class SharedHostWorker(HostWorker):
    """Copies to and from the region that the scheduler process sees too."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        super().__init__(kv_caches, chunks=1)
        self._region = region
        self._host: list[Any] = [
            region.create_next_worker_view(rows.shape[1]).numpy() for rows in self._device
        ]

    def shutdown(self) -> None:
        super().shutdown()
        self._host.clear()
        self._region.cleanup()
