"""Copies between a cache's pages and the arena's slots, in host memory or through staging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvstore_kernels.host import HostPages
from kvstore_kernels.staging import Staging
from kvstore_transformers.cache import Pages


class Copier(Protocol):
    """Copies in both directions. Reads and writes may run at once, two reads may not."""

    def mark(self) -> Any:
        """Return the point the model has reached; a copy `after` it sees that work done."""

    def read(
        self, pages: Pages, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        """Copy blocks into records; done when this returns."""

    def write(
        self, pages: Pages, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        """Copy records into blocks; done when this returns."""


def copier_for(device: torch.device, record_nbytes_max: int) -> Copier:
    """Return what copies to and from `device`."""
    return HostCopier() if device.type == "cpu" else DeviceCopier(device, record_nbytes_max)


class HostCopier:
    """In host memory models compute synchronously: nothing is ever in flight."""

    def mark(self) -> None: ...

    def read(
        self, pages: Pages, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> None:
        source = HostPages(pages)
        for block, record in zip(blocks, records, strict=True):
            source.read(block, record)

    def write(
        self, pages: Pages, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> None:
        target = HostPages(pages)
        for block, record in zip(blocks, records, strict=True):
            target.write(block, record)


class DeviceCopier:
    """Through pinned buffers, on a stream for each direction."""

    def __init__(self, device: torch.device, record_nbytes_max: int) -> None:
        self._device = device
        self._out = Staging(device, record_nbytes_max)
        self._in = Staging(device, record_nbytes_max)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def read(
        self, pages: Pages, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        self._out.read(pages, blocks, records, after)

    def write(
        self, pages: Pages, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> None:
        self._in.write(pages, blocks, records, after)
