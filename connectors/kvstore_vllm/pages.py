"""Records in and out of the device's pages: in host memory, or by DMA for CUDA.

Records live in the arena's slots and are always host bytes here; a *page* is one layer's part of a
block. Both implementations are used by one thread that reads and `writers` that write, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from kvstore.model.checksum import checksum
from kvstore.system.numa import cpus_near, pin_this_thread
from kvstore_kernels.codec.copies import Decoded, Fine
from kvstore_kernels.device import Device, open_device
from kvstore_kernels.host import HostPages
from kvstore_kernels.lane import Lanes, Transfer
from kvstore_kernels.packing import Leaves, checksum_of_leaves, open_paged
from kvstore_kernels.registration import Extents, Registration
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.prefill import Event, HostEvent

CLOSE_WAIT_S = 2.0
ENCODED_NBYTES_MAX = 64 << 20


class Sized(Protocol):
    """A record in memory of its pages' own."""

    @property
    def nbytes(self) -> int: ...


class Encoded(NamedTuple):
    """The records of one block. fine: of a lossy block. uncoded: the base is raw."""

    base: Sized
    fine: Sized | None
    uncoded: bool = False


class Pages(Protocol):
    """The KV cache of one worker, by group and device block.

    record_nbytes: of each group's records, the most if they are coded. raw_nbytes: of each group's
    blocks, as the engine holds them. coded: records have sizes of their own; they are written by
    `encode`, before there is a slot, and by `store` then, instead of `read`. lossy: sizes of each
    group's parts, nothing if records are exact; lossy ones are read by `refine` instead of `write`.
    encoded_nbytes_max: how much is to be encoded at once, in bytes as the engine has them.
    bounced_nbytes: what went through a buffer, because the device does not reach the arena (yet).
    """

    record_nbytes: list[int]
    raw_nbytes: list[int]
    writers: int
    coded: bool
    lossy: Sequence[LossySizes]
    encoded_nbytes_max: int

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
        self, group: int, blocks: Sequence[int], after: Any, exact: Sequence[bool] = ()
    ) -> Sequence[Encoded]:
        """Return the records of device blocks, in private memory until the group's next call.

        The blocks are free when this returns. exact: of lossy pages, the blocks that are stored
        exactly all the same; none: no block is.
        """
        ...

    def store(self, group: int, parts: Sequence[tuple[Sized, memoryview]]) -> Sequence[int]:
        """Copy records of the group's last `encode` into slots of their sizes; done when this
        returns. Returns the checksums of the records, as they were meant to be."""
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
        after: Any,
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


class RawPages:
    """What pages have in common whose records are neither coded nor lossy."""

    coded = False
    lossy: Sequence[LossySizes] = ()
    encoded_nbytes_max = ENCODED_NBYTES_MAX

    @property
    def form(self) -> str:
        return ""

    def encode(
        self, group: int, blocks: Sequence[int], after: Any, exact: Sequence[bool] = ()
    ) -> Sequence[Encoded]:
        raise NotImplementedError("these records are not coded")

    def store(self, group: int, parts: Sequence[tuple[Sized, memoryview]]) -> Sequence[int]:
        raise NotImplementedError("these records are not coded")

    def refine(
        self,
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
        after: Any,
    ) -> Sequence[Decoded]:
        raise NotImplementedError("these records are not lossy")


class HostMemory(RawPages):
    """Pages in host memory: plain memmoves, of which one core does not fill the memory bus."""

    writers = 2
    bounced_nbytes = 0

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._pages = [HostPages(layers) for layers in groups]
        self.record_nbytes = [pages.record_nbytes for pages in self._pages]
        self.raw_nbytes = self.record_nbytes

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

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> Sequence[int | None]:
        return self._pages[group].write_all(blocks, records, checksum)

    def close(self) -> None: ...


class DevicePages:
    """What all pages in device memory need of the device, and of the threads that copy."""

    writers = 1

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pin_thread = partial(pin_this_thread, cpus_near(device.pci_address))

    def enter_thread(self) -> None:
        self._device.enter_thread()
        self._pin_thread()

    def mark(self) -> Any:
        return self._device.mark()

    def event(self) -> Event:
        """Return an event to time steps with."""
        if self._device.torch_device.type == "cpu":
            return HostEvent()
        event: Event = torch.cuda.Event(enable_timing=True)
        return event


class DeviceMemory(DevicePages, RawPages):
    """Pages in device memory, through a ring of staging buffers in each direction."""

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], extents: Extents) -> None:
        self._paged = open_paged(groups)
        super().__init__(open_device(self._paged.device))
        self.record_nbytes = self._paged.record_nbytes
        self.raw_nbytes = self.record_nbytes
        self._lanes = Lanes(self._device, max(self.record_nbytes), extents, self._pin_thread)

    @property
    def registration(self) -> Registration:
        """What of the arena the device reaches by itself."""
        return self._lanes.registration

    @property
    def bounced_nbytes(self) -> int:
        return self._lanes.bounced_nbytes

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Iterable[int]:
        return self._copied(self._lanes.out.read, group, blocks, records, after)

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
