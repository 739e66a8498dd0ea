"""Records in and out of the device's pages: in host memory, or by DMA for CUDA.

Records live in the arena's slots and are always host bytes here; a *page* is one layer's part of a
block. Both implementations are used by one thread that reads and `writers` that write, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kvstore.model.checksum import checksum
from kvstore.system.numa import cpus_near, pin_this_thread
from kvstore_kernels.codec.coder import Encoded
from kvstore_kernels.codec.copies import Decoded, Fine
from kvstore_kernels.device import open_device
from kvstore_kernels.host import HostPages
from kvstore_kernels.lane import Lanes, Transfer
from kvstore_kernels.packing import Leaves, checksum_of_leaves, open_paged
from kvstore_kernels.registration import Extents
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.prefill import Event, HostEvent

CLOSE_WAIT_S = 2.0


class Pages(Protocol):
    """The KV cache of one worker, by group and device block.

    record_nbytes: of each group's records, the most if they are coded. raw_nbytes: of each group's
    blocks, as the engine holds them. coded: records have sizes of their own; they are written by
    `encode`, before there is a slot, instead of `read`. lossy: sizes of each group's parts, nothing
    if records are exact; lossy ones are read by `refine` instead of `write`.
    bounced_nbytes: what went through a buffer, because the device does not reach the arena (yet).
    """

    record_nbytes: list[int]
    raw_nbytes: list[int]
    writers: int
    coded: bool
    lossy: Sequence[LossySizes]

    @property
    def form(self) -> str:
        """What engines have to agree on to read each other's records; "": as they are."""
        ...

    @property
    def bounced_nbytes(self) -> int: ...

    def enter_thread(self) -> None:
        """Called first in every thread that copies."""

    def mark(self) -> Any:
        """Return the point the engine has reached; a copy made `after` it sees that work done."""
        ...

    def event(self) -> Event:
        """Return an event to time the engine's work with."""
        ...

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Iterable[int]:
        """Copy device blocks into records; done when this returns.

        Returns their checksums, which may be computed when they are asked for."""
        ...

    def encode(
        self, group: int, blocks: Sequence[int], exact: Sequence[bool] = ()
    ) -> Sequence[Encoded]:
        """Return the records of device blocks, in private memory until the group's next call.

        exact: of lossy pages, the blocks that are stored exactly all the same; none: no block is.
        """
        ...

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Sequence[int | None]:
        """Copy records into device blocks; done when this returns.

        Returns the checksums of what was copied, taken after the copy, so that a slot that changed
        under it is noticed too; None for what is no record of these pages."""
        ...

    def refine(
        self,
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
    ) -> Sequence[Decoded]:
        """The same for lossy pages: base parts, with the fine parts that there are.

        A fine part that is wrong, or of another base, is not used."""
        ...

    def close(self) -> None:
        """Let go of the arena; no copies after it."""


def by_block(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer (kernel blocks, H, n, C) as (blocks, H, ..., C) in logical order.

    A block may consist of several kernel blocks; their slots follow each other.
    """
    if layer.shape[0] == num_blocks:
        return layer
    return layer.unflatten(0, (num_blocks, -1)).transpose(1, 2)


class HostMemory:
    """Pages in host memory: plain memmoves, of which one core does not fill the memory bus."""

    writers = 2
    coded = False
    lossy: Sequence[LossySizes] = ()
    bounced_nbytes = 0

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._pages = [HostPages(layers) for layers in groups]
        self.record_nbytes = [pages.record_nbytes for pages in self._pages]
        self.raw_nbytes = self.record_nbytes

    @property
    def form(self) -> str:
        return ""

    def enter_thread(self) -> None: ...

    def mark(self) -> None:
        """CPU engines compute synchronously: nothing is ever in flight here."""

    def event(self) -> HostEvent:
        """Return an event to time steps with."""
        return HostEvent()

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> Iterable[int]:
        return self._pages[group].read_all(blocks, records, checksum)

    def encode(
        self, group: int, blocks: Sequence[int], exact: Sequence[bool] = ()
    ) -> Sequence[Encoded]:
        raise NotImplementedError("these records are not coded")

    def refine(
        self,
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
    ) -> Sequence[Decoded]:
        raise NotImplementedError("these records are not lossy")

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> Sequence[int | None]:
        return self._pages[group].write_all(blocks, records, checksum)

    def close(self) -> None: ...


class DeviceMemory:
    """Pages in device memory, through a ring of staging buffers in each direction."""

    writers = 1
    coded = False
    lossy: Sequence[LossySizes] = ()

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], extents: Extents) -> None:
        self._paged = open_paged(groups)
        self.record_nbytes = self._paged.record_nbytes
        self.raw_nbytes = self.record_nbytes
        device = open_device(self._paged.device)
        self._cpus = cpus_near(device.pci_address)
        self._lanes = Lanes(
            device, max(self.record_nbytes), extents, partial(pin_this_thread, self._cpus)
        )

    @property
    def form(self) -> str:
        return ""

    @property
    def bounced_nbytes(self) -> int:
        return self._lanes.bounced_nbytes

    def enter_thread(self) -> None:
        self._lanes.device.enter_thread()
        pin_this_thread(self._cpus)

    def mark(self) -> Any:
        return self._lanes.device.mark()

    def event(self) -> Event:
        if self._paged.device.type == "cpu":
            return HostEvent()
        event: Event = torch.cuda.Event(enable_timing=True)
        return event

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Iterable[int]:
        return self._copied(self._lanes.out.read, group, blocks, records, after)

    def encode(
        self, group: int, blocks: Sequence[int], exact: Sequence[bool] = ()
    ) -> Sequence[Encoded]:
        raise NotImplementedError("these records are not coded")

    def refine(
        self,
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
    ) -> Sequence[Decoded]:
        raise NotImplementedError("these records are not lossy")

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Sequence[int | None]:
        return self._copied(self._lanes.back.write, group, blocks, records, after)

    def close(self) -> None:
        self._lanes.close(CLOSE_WAIT_S)

    def _copied(
        self,
        copy: Callable[[Sequence[Transfer], Any], Iterator[Leaves]],
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        after: Any,
    ) -> list[int]:
        transfer = Transfer(self._paged, [(group, block) for block in blocks], records)
        (leaves,) = copy([transfer], after)
        return [checksum_of_leaves(each) for each in leaves]
