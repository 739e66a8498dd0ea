"""vLLM's own CPU offloading on the CPU platform, so that kvstore has it as a peer in the same run.

vLLM's stock spec refuses platforms without a GPU. Only its copies between device and host are
replaced here, by a thread that copies rows of memory; manager, eviction, lookups and metrics are
vLLM's own. Written against vLLM 0.32 (`vllm/v1/kv_offload`), one engine block per chunk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Rows = np.ndarray[Any, np.dtype[np.int8]]
Copy = tuple[Rows, Rows]  # source, target
WAIT_TIMEOUT_S = 60.0


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec without its check for a GPU."""

    _worker: HostWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the one worker of this process."""
        if self.blocks_per_chunk != 1:
            raise ValueError("HostSpec copies one engine block per chunk: leave block_size unset")
        if not self._worker:
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the engine's KV tensors and as many host rows, on one thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._refs = kv_caches.group_data_refs
        self._device = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes).numpy()
            for each in kv_caches.tensors
        ]
        # Filled, not just reserved: a first touch costs ten times a copy.
        self._host = [np.ones((chunks, rows.shape[1]), np.int8) for rows in self._device]
        self._jobs: queue.SimpleQueue[tuple[int, list[Copy]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._finished: list[TransferResult] = []
        self._thread = threading.Thread(target=self._run, name="host-copy", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Copy engine blocks to host rows."""
        copies = [(device, host) for device, host in self._rows(src_spec, dst_spec.block_ids)]
        return self._submit(job_id, copies)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy host rows to engine blocks."""
        copies = [(host, device) for device, host in self._rows(dst_spec, src_spec.block_ids)]
        return self._submit(job_id, copies)

    def get_finished(self) -> list[TransferResult]:
        """Return what has ended since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending & job_ids, WAIT_TIMEOUT_S):
                raise TimeoutError("host copies are stuck")

    def shutdown(self) -> None:
        """Finish what was submitted and end the thread."""
        self._jobs.put(None)
        self._thread.join(WAIT_TIMEOUT_S)

    def _rows(self, device: GPULoadStoreSpec, chunks: Any) -> Iterator[Copy]:
        """Yield (device row, host row) of every tensor; chunks are in the order of blocks."""
        first = 0
        for refs, size in zip(self._refs, device.group_sizes, strict=True):
            block_ids = device.block_ids[first : first + size].tolist()
            chunk_ids = chunks[first : first + size].tolist()
            first += size
            for ref in refs:
                rows, kept = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                yield from ((rows[b], kept[c]) for b, c in zip(block_ids, chunk_ids, strict=True))

    def _submit(self, job_id: int, copies: list[Copy]) -> bool:
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put((job_id, copies))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, copies = job
            started = time.perf_counter()
            for source, target in copies:
                target[:] = source
            nbytes = sum(source.nbytes for source, _ in copies)
            result = TransferResult(job_id, True, nbytes, time.perf_counter() - started)
            with self._changed:
                self._finished.append(result)
                self._pending.discard(job_id)
                self._changed.notify_all()
