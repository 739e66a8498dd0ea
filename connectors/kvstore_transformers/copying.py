"""Copies between a cache's pages and the arena's slots, in host memory or by DMA."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from kvstore import checksum
from kvstore.system.numa import cpus_near, pin_this_thread
from kvstore_kernels.device import open_device
from kvstore_kernels.host import HostPages
from kvstore_kernels.lane import Lanes, Transfer
from kvstore_kernels.packing import (
    Leaves,
    PagedKV,
    checksum_of_leaves,
    kernels_work,
    leaves_of,
    open_paged,
)
from kvstore_kernels.views import tensor_of
from kvstore_transformers.cache import Pages

CLOSE_WAIT_S = 2.0


class Filled(NamedTuple):
    """Pages of which some blocks, at least one, come from records."""

    pages: Pages
    blocks: Sequence[int]
    records: Sequence[memoryview]


class Copier(Protocol):
    """Copies in both directions. Reads and writes may run at once, two reads may not.

    bounced_nbytes: what went through a buffer, because the device does not reach the arena (yet).
    """

    @property
    def bounced_nbytes(self) -> int: ...

    def enter_thread(self) -> None:
        """Called first in every thread that copies."""

    def mark(self) -> Any:
        """Return the point the model has reached; a copy `after` it sees that work done."""

    def open(self, pages: Pages) -> Any:
        """Return `pages` as `read` wants them."""

    def read(
        self, opened: Any, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Iterable[int]:
        """Copy blocks into records, done when this returns; returns the records' checksums."""

    def write(self, filled: Sequence[Filled], after: Any) -> Generator[Leaves]:
        """Copy records into pages, in order; yields, when pages are done, what the copied records'
        leaves sum up to: taken after the copy, so that a slot that changed under it is noticed."""

    def wait_reached(self, timeout_s: float) -> bool:
        """Wait until the device reaches all of the arena by itself. False: not yet, or never."""
        ...

    def close(self) -> None:
        """Let go of the arena; no copies after it."""


def copier_for(
    device: torch.device,
    record_nbytes_max: int,
    extents: Callable[[], Mapping[int, memoryview]],
) -> Copier:
    """Return what copies to and from `device`. extents: `Client.extents`."""
    if device.type == "cpu":
        return HostCopier()
    return DeviceCopier(device, record_nbytes_max, extents)


class HostCopier:
    """In host memory models compute synchronously: nothing is ever in flight."""

    bounced_nbytes = 0

    def enter_thread(self) -> None: ...

    def mark(self) -> None: ...

    def open(self, pages: Pages) -> HostPages:
        return HostPages(pages)

    def read(
        self,
        opened: HostPages,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        after: None,
    ) -> Iterable[int]:
        return opened.read_all(blocks, records, checksum)

    def write(self, filled: Sequence[Filled], after: None) -> Generator[Leaves]:
        for pages, blocks, records in filled:
            target = HostPages(pages)
            leaves = []
            for block, record in zip(blocks, records, strict=True):
                target.write(block, record)
                leaves.append(leaves_of(tensor_of(record)))
            yield leaves

    def wait_reached(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None: ...


class DeviceCopier:
    """Through a ring of staging buffers for each direction, each with streams of its own."""

    def __init__(
        self,
        device: torch.device,
        record_nbytes_max: int,
        extents: Callable[[], Mapping[int, memoryview]],
    ) -> None:
        opened = open_device(device)
        kernels_work(opened.torch_device)  # tried and compiled now, before a prompt waits for it
        self._cpus = cpus_near(opened.pci_address)
        self._lanes = Lanes(
            opened, record_nbytes_max, extents, partial(pin_this_thread, self._cpus)
        )

    @property
    def bounced_nbytes(self) -> int:
        return self._lanes.bounced_nbytes

    def enter_thread(self) -> None:
        self._lanes.device.enter_thread()
        pin_this_thread(self._cpus)

    def mark(self) -> Any:
        return self._lanes.device.mark()

    def open(self, pages: Pages) -> PagedKV:
        return open_paged([pages])

    def read(
        self, opened: PagedKV, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Iterable[int]:
        transfer = Transfer(opened, [(0, block) for block in blocks], records)
        (leaves,) = self._lanes.out.read([transfer], after)
        return map(checksum_of_leaves, leaves)

    def write(self, filled: Sequence[Filled], after: Any) -> Generator[Leaves]:
        transfers = [
            Transfer(open_paged([pages]), [(0, block) for block in blocks], records)
            for pages, blocks, records in filled
        ]
        return self._lanes.back.write(transfers, after)

    def wait_reached(self, timeout_s: float) -> bool:
        return self._lanes.registration.wait(timeout_s)

    def close(self) -> None:
        self._lanes.close(CLOSE_WAIT_S)
