"""Records between device pages and host memory: packed on the device, one DMA, memmoves.

Each direction has its own stream and buffers, so loads do not queue behind saves, and the engine's
kernels wait for nothing but the packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvstore_kernels.paged import gather_blocks, record_nbytes, scatter_blocks

STAGING_NBYTES = 64 << 20


class Staging:
    """One direction's stream and its two staging buffers. Used by one thread at a time."""

    def __init__(self, device: torch.device, record_nbytes_max: int) -> None:
        nbytes = max(STAGING_NBYTES, record_nbytes_max)
        self._stream = torch.cuda.Stream(device)
        self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._view = memoryview(self._pinned.numpy())

    def batch(self, nbytes: int) -> int:
        """Return how many records of `nbytes` are staged at once."""
        return len(self._view) // nbytes

    def read(
        self,
        layers: Sequence[Tensor],
        blocks: Sequence[int],
        records: Sequence[memoryview],
        after: torch.cuda.Event,
    ) -> None:
        """Copy device blocks into records, once the device has come to `after`; done on return."""
        nbytes = record_nbytes(layers)
        for part, staged, pinned in self._rounds(len(blocks), nbytes):
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(after)
                gather_blocks(layers, blocks[part], staged)
                pinned.copy_(staged, non_blocking=True)
            self._stream.synchronize()
            for index, record in enumerate(records[part]):
                record[:nbytes] = self._view[index * nbytes : (index + 1) * nbytes]

    def write(
        self,
        layers: Sequence[Tensor],
        blocks: Sequence[int],
        records: Sequence[memoryview],
        after: torch.cuda.Event,
    ) -> None:
        """Copy records into device blocks, once the device has come to `after`; done on return."""
        nbytes = record_nbytes(layers)
        for part, staged, pinned in self._rounds(len(blocks), nbytes):
            for index, record in enumerate(records[part]):
                self._view[index * nbytes : (index + 1) * nbytes] = record[:nbytes]
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(after)
                staged.copy_(pinned, non_blocking=True)
                scatter_blocks(staged, layers, blocks[part])
            self._stream.synchronize()

    def _rounds(self, count: int, nbytes: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield which records go together, and their device and pinned rows."""
        step = self.batch(nbytes)
        for first in range(0, count, step):
            size = min(step, count - first)
            staged = self._staged[: size * nbytes].view(size, nbytes)
            pinned = self._pinned[: size * nbytes].view(size, nbytes)
            yield slice(first, first + size), staged, pinned
