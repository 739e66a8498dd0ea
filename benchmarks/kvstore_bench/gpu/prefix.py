"""A long prefix between a GPU's pages and a daemon, as the workers of an engine move it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvstore import Client, CorruptBlock, Grant
from kvstore_bench.gpu.arena import Slots
from kvstore_kernels.codec.device_coder import DeviceCoder
from kvstore_kernels.coded_lane import ENCODED_NBYTES_MAX, DecodingLane, EncodingLane, Load
from kvstore_kernels.device import Device
from kvstore_kernels.lane import Lane, Transfer
from kvstore_kernels.packing import checksum_of_leaves, open_paged
from kvstore_kernels.registration import Registration

if TYPE_CHECKING:
    from kvstore_bench.gpu.gpu import GpuPlan


class Prefix(Protocol):
    def save(self) -> None:
        """Store the prefix's blocks; done when the daemon has them."""

    def restore(self) -> None:
        """Load them; done when they are in the pages and verified. Raises CorruptBlock."""


class RawPrefix:
    """Records as the engine holds them."""

    def __init__(
        self,
        plan: GpuPlan,
        client: Client,
        layers: list[torch.Tensor],
        device: Device,
        registration: Registration,
    ) -> None:
        self._device = device
        self._slots = Slots(client, plan, "prefix", plan.prefix_blocks)
        self._paged = open_paged([layers])
        self._batch = [(0, block) for block in range(plan.prefix_blocks)]
        self._out, self._back = (Lane(device, plan.record_nbytes, registration) for _ in range(2))

    def save(self) -> None:
        grant, records = self._slots.reserve(0, len(self._batch))
        transfer = Transfer(self._paged, self._batch, records)
        (leaves,) = self._out.read([transfer], self._device.mark())
        self._slots.client.commit(grant.lease_id, [checksum_of_leaves(each) for each in leaves])

    def restore(self) -> None:
        found, records = self._slots.acquire()
        transfer = Transfer(self._paged, self._batch, records)
        (leaves,) = self._back.write([transfer], self._device.mark())
        _check([checksum_of_leaves(each) for each in leaves], found)
        self._slots.client.release(found.lease_id)


class CodedPrefix:
    """Records coded on the device, some blocks at a time."""

    def __init__(
        self,
        plan: GpuPlan,
        client: Client,
        coder: DeviceCoder,
        device: Device,
        registration: Registration,
    ) -> None:
        self._device, self._coder = device, coder
        self._slots = Slots(client, plan, "coded prefix", plan.prefix_blocks, varies=True)
        self._blocks = list(range(plan.prefix_blocks))
        self._step = max(1, ENCODED_NBYTES_MAX // plan.record_nbytes)
        self._out = EncodingLane(device, registration)
        self._back = DecodingLane(device, coder.room_nbytes(), registration)

    def save(self) -> None:
        for first in range(0, len(self._blocks), self._step):
            blocks = self._blocks[first : first + self._step]
            made = [
                each.base for each in self._out.encode(0, self._coder, blocks, self._device.mark())
            ]
            sizes = [each.nbytes for each in made]
            grant, views = self._slots.reserve(first, first + len(blocks), sizes)
            self._out.copy_out(0, list(zip(made, views, strict=True)))
            self._slots.client.commit(grant.lease_id, [each.checksum for each in made])

    def restore(self) -> None:
        found, records = self._slots.acquire()
        loads = [Load(*each) for each in zip(self._blocks, records, strict=True)]
        decoded = self._back.decode(self._coder, loads, self._device.mark())
        _check([each.base for each in decoded], found)
        self._slots.client.release(found.lease_id)


def _check(sums: list[int | None], found: Grant) -> None:
    if sums != list(found.checksums):
        raise CorruptBlock("a record did not come back as it was saved")
