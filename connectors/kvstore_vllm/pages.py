"""Records in and out of the device's pages: in host memory, or through pinned staging for CUDA.

Records live in the arena's slots and are always host bytes here; a *page* is one layer's part of a
block. Both implementations are used by one thread that reads and `writers` that write, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvstore_kernels.host import HostPages
from kvstore_kernels.paged import record_nbytes
from kvstore_kernels.staging import Staging
from kvstore_vllm.prefill import Event, HostEvent


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
    """Pages in device memory, through pinned staging buffers."""

    writers = 1

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self.record_nbytes = [record_nbytes(layers) for layers in groups]
        self._out = Staging(device, max(self.record_nbytes))
        self._in = Staging(device, max(self.record_nbytes))

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def batch(self, group: int) -> int:
        return self._in.batch(self.record_nbytes[group])

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        self._out.read(self._groups[group], blocks, records, after)

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        self._in.write(self._groups[group], blocks, records, after)
