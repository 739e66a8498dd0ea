"""Records in and out of the device's pages: in host memory, or through pinned staging for CUDA.

Records live in the arena's slots and are always host bytes here; a *page* is one layer's part of a
block. Both implementations are used by one thread that reads and `writers` that write, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvstore_kernels.host import HostPages
from kvstore_kernels.paged import gather_blocks, record_nbytes, scatter_blocks
from kvstore_vllm.prefill import Event, HostEvent

STAGING_NBYTES = 64 << 20


class Pages(Protocol):
    """The KV cache of one worker, by group and device block."""

    record_nbytes: list[int]
    writers: int

    def mark(self) -> Any:
        """Return the point the engine has reached; a copy made `after` it sees that work done."""
        ...

    def event(self) -> Event:
        """Return an event to time the engine's work with."""
        ...

    def batch(self, group: int) -> int:
        """Return how many records are best written in one call."""
        ...

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        """Copy device blocks into records; done when this returns."""
        ...

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        """Copy records into device blocks; done when this returns."""
        ...


def open_pages(groups: Sequence[Sequence[torch.Tensor]], num_blocks: int) -> Pages:
    """Return the pages of `groups`, lists of layers as vLLM registers them."""
    layers = [[_by_block(layer, num_blocks) for layer in group] for group in groups]
    device = layers[0][0].device
    return HostMemory(layers) if device.type == "cpu" else StagedMemory(layers, device)


def _by_block(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer (kernel blocks, H, n, C) as (blocks, H, ..., C) in logical order.

    A block may consist of several kernel blocks; their slots follow each other.
    """
    if layer.shape[0] == num_blocks:
        return layer
    return layer.unflatten(0, (num_blocks, -1)).transpose(1, 2)


class HostMemory:
    """Pages in host memory: plain memmoves, of which one core does not fill the memory bus."""

    writers = 2

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._pages = [HostPages(layers) for layers in groups]
        self.record_nbytes = [pages.record_nbytes for pages in self._pages]

    def mark(self) -> None:
        """CPU engines compute synchronously: nothing is ever in flight here."""

    def event(self) -> HostEvent:
        """Return an event to time steps with."""
        return HostEvent()

    def batch(self, group: int) -> int:
        return 1

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> None:
        for block, record in zip(blocks, records, strict=True):
            self._pages[group].read(block, record)

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> None:
        for block, record in zip(blocks, records, strict=True):
            self._pages[group].write(block, record)


class StagedMemory:
    """Pages in device memory: gather on the device, one DMA through a pinned buffer, memmoves.

    Each direction has its own stream and buffers, so loads do not queue behind saves.
    """

    writers = 1

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self.record_nbytes = [record_nbytes(layers) for layers in groups]
        self._out = _Lane(device, max(self.record_nbytes))
        self._in = _Lane(device, max(self.record_nbytes))

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def batch(self, group: int) -> int:
        return self._in.batch(self.record_nbytes[group])

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        nbytes, lane = self.record_nbytes[group], self._out
        for first in range(0, len(blocks), lane.batch(nbytes)):
            part = slice(first, first + lane.batch(nbytes))
            staged, pinned, view = lane.buffers(len(blocks[part]), nbytes)
            with torch.cuda.stream(lane.stream):
                lane.stream.wait_event(after)
                gather_blocks(self._groups[group], blocks[part], staged)
                pinned.copy_(staged, non_blocking=True)
            lane.stream.synchronize()
            for index, record in enumerate(records[part]):
                record[:nbytes] = view[index * nbytes : (index + 1) * nbytes]

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        nbytes, lane = self.record_nbytes[group], self._in
        for first in range(0, len(blocks), lane.batch(nbytes)):
            part = slice(first, first + lane.batch(nbytes))
            staged, pinned, view = lane.buffers(len(blocks[part]), nbytes)
            for index, record in enumerate(records[part]):
                view[index * nbytes : (index + 1) * nbytes] = record[:nbytes]
            with torch.cuda.stream(lane.stream):
                lane.stream.wait_event(after)
                staged.copy_(pinned, non_blocking=True)
                scatter_blocks(staged, self._groups[group], blocks[part])
            lane.stream.synchronize()


class _Lane:
    """One direction's stream and its two staging buffers."""

    def __init__(self, device: torch.device, record_nbytes_max: int) -> None:
        nbytes = max(STAGING_NBYTES, record_nbytes_max)
        self.stream = torch.cuda.Stream(device)
        self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._view = memoryview(self._pinned.numpy())

    def batch(self, nbytes: int) -> int:
        """Return how many records of `nbytes` are staged at once."""
        return len(self._view) // nbytes

    def buffers(self, count: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor, memoryview]:
        """Return the device rows, the pinned rows and the bytes of `count` records."""
        staged = self._staged[: count * nbytes].view(count, nbytes)
        return staged, self._pinned[: count * nbytes].view(count, nbytes), self._view
