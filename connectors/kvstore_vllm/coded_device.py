"""Pages in device memory whose records are coded there, by the kernels of `cuda/codec.cu`.

    save: pages --encode--> staging memory, a part for each group; then --DMA--> slots
    load: slots --DMA--> a ring --decode--> pages

Only coded bytes cross the link, and they are the bytes that engines on a processor write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kvstore_kernels.codec.coder import Memory
from kvstore_kernels.codec.copies import Decoded, Fine
from kvstore_kernels.codec.device_coder import DeviceCoder
from kvstore_kernels.codec.device_passes import Staged
from kvstore_kernels.codec.device_trial import open_coder
from kvstore_kernels.codec.places import Unplaced
from kvstore_kernels.coded_lane import ENCODED_NBYTES_MAX, PIECE_NBYTES, CodedLanes, Load
from kvstore_kernels.device import Device, open_device
from kvstore_kernels.packing import open_paged
from kvstore_kernels.registration import Extents
from kvstore_vllm.coded import (
    RAW_WANTED,
    Fidelity,
    Record,
    check_gain,
    form_of,
    lossy_sizes,
    settle_for_raw,
)
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.packings import Packing
from kvstore_vllm.pages import CLOSE_WAIT_S, DeviceMemory, DevicePages, Encoded, Sized
from kvstore_vllm.side_by_side import places_side_by_side, shape_side_by_side

OpenCoder = Callable[..., DeviceCoder | None]
"""As `open_coder`."""


class CodedDeviceMemory(DevicePages):
    """The KV cache of one worker in device memory, as coded records.

    It takes device memory for `encoded_nbytes_max` (1.25 times as much if records are lossy, at
    least a block) for each group that has saved, and for three pieces of a ring.
    """

    coded = True
    encoded_nbytes_max = ENCODED_NBYTES_MAX

    def __init__(
        self,
        coders: Sequence[DeviceCoder],
        device: Device,
        extents: Extents,
        *,
        piece_nbytes: int = PIECE_NBYTES,
        shards: int = 1,
    ) -> None:
        """coders: of each group, all lossy or none. extents: as `Registration` takes them. shards:
        how many groups, one after another, are shards of one group of the engine."""
        super().__init__(device)
        self._coders = coders
        self._shapes = [coder.shape for coder in coders]
        self.record_nbytes = [coder.record_nbytes for coder in coders]
        self.raw_nbytes = [shape.raw_nbytes for shape in self._shapes]
        lossy = coders[0].lossy
        self._form = form_of(self._shapes[::shards], lossy=lossy)
        self.lossy: Sequence[LossySizes] = lossy_sizes(self._shapes) if lossy else ()
        lanes = CodedLanes(device, coders, extents, self._pin_thread, piece_nbytes=piece_nbytes)
        self.registration, self._out, self._back = lanes.registration, lanes.out, lanes.back

    @property
    def form(self) -> str:
        return self._form

    @property
    def bounced_nbytes(self) -> int:
        return self._out.bounced_nbytes + self._back.bounced_nbytes

    def read(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> Sequence[int]:
        raise NotImplementedError("the sizes of coded records are not known before `encode`")

    def encode(
        self, group: int, blocks: Sequence[int], after: Any, exact: Sequence[bool] = ()
    ) -> list[Encoded]:
        made = self._out.encode(group, self._coders[group], blocks, after, exact)
        return [Encoded(*each) for each in made]

    def store(self, group: int, parts: Sequence[tuple[Sized, memoryview]]) -> list[int]:
        staged = [(cast(Staged, record), view) for record, view in parts]
        self._out.copy_out(group, staged)
        return [record.checksum for record, _ in staged]

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: Any
    ) -> list[int | None]:
        found = self.refine(group, blocks, records, [None] * len(records), after)
        return [each.base for each in found]

    def refine(
        self,
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
        after: Any,
    ) -> list[Decoded]:
        loads = [Load(*each) for each in zip(blocks, records, fines, strict=True)]
        return self._back.decode(self._coders[group], loads, after)

    def close(self) -> None:
        """Let go of the arena, when copies under way have ended."""
        self.registration.close(CLOSE_WAIT_S)


def open_device_memory(
    groups: Sequence[Sequence[torch.Tensor]],
    packings: Sequence[Sequence[Packing]],
    extents: Extents,
    record: Record,
    fidelity: Fidelity = "exact",
    *,
    opened: OpenCoder = open_coder,
    device: Device | None = None,
    shards: int = 1,
) -> DeviceMemory | CodedDeviceMemory:
    """Return pages in device memory: coded if that is wanted and possible.

    packings: of each layer of each group. opened, device: what codes and copies, if not the device
    of `groups`. shards: how many of `groups` are shards of one group of the engine. Raises
    ConfigError if coding was asked for by name and is not possible.
    """
    lossy = fidelity == "ep"
    if record == "raw" and not lossy:
        return DeviceMemory(groups, extents)
    why = RAW_WANTED if record == "raw" else ""
    if not why:
        try:
            coders = open_coders(groups, packings, opened, lossy=lossy)
            opened_on = device or open_device(groups[0][0].device)
            return CodedDeviceMemory(coders, opened_on, extents, shards=shards)
        except Unplaced as error:
            why = str(error)
        except Exception as error:  # kernels are compiled and launched here
            why = f"the codec's kernels cannot be used: {error!r}"
    settle_for_raw(why, record, fidelity)
    return DeviceMemory(groups, extents)


def open_coders(
    groups: Sequence[Sequence[torch.Tensor]],
    packings: Sequence[Sequence[Packing]],
    opened: OpenCoder,
    *,
    lossy: bool,
) -> list[DeviceCoder]:
    """Return the coder of each group. Raises Unplaced, saying why, if one cannot be had."""
    shapes = [shape_side_by_side(*each) for each in zip(groups, packings, strict=True)]
    check_gain(shapes, lossy=lossy)
    paged, coders = open_paged(groups), []
    for index, (shape, layers) in enumerate(zip(shapes, groups, strict=True)):
        places = places_side_by_side(layers, packings[index])
        coder = opened(shape, Memory.of(layers), (paged, index), places, lossy=lossy)
        if coder is None:
            raise Unplaced("the codec's kernels do not work on this device: see codec=off above")
        coders.append(coder)
    return coders
