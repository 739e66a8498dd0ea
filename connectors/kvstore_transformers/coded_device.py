"""Coded records of a model on a GPU, by the kernels of `cuda/codec.cu`: only coded bytes cross the
link.

A cache has its KV in other tensors with every prompt. So kernels are compiled, tried and told of a
group's records once, when a model is opened, and of where its pages lie with every load and save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from kvstore.system.numa import cpus_near, pin_this_thread
from kvstore_kernels.codec.coder import Memory
from kvstore_kernels.codec.copies import Decoded, Fine
from kvstore_kernels.codec.device_coder import DeviceCoder
from kvstore_kernels.codec.device_passes import OnDevice, Staged
from kvstore_kernels.codec.device_trial import open_coder
from kvstore_kernels.codec.places import Place, Unplaced
from kvstore_kernels.coded_lane import ENCODED_NBYTES_MAX, CodedLanes
from kvstore_kernels.coded_lane import Load as LaneLoad
from kvstore_kernels.device import Device, open_device
from kvstore_kernels.packing import PagedKV, open_paged
from kvstore_kernels.registration import Extents
from kvstore_transformers.cache import Pages, empty_pages
from kvstore_transformers.coding import CodedCopier, Coding, Sized, places_of
from kvstore_transformers.copying import CLOSE_WAIT_S
from kvstore_transformers.namespace import Layout

OpenCoder = Callable[..., DeviceCoder | None]
"""As `open_coder`."""


class DeviceCoding(Coding):
    def __init__(
        self,
        layout: Layout,
        block_tokens: int,
        *,
        lossy: bool,
        opened: OpenCoder = open_coder,
        device: Device | None = None,
    ) -> None:
        """Compile and try the kernels. opened, device: what codes and copies, if not the model's
        device.

        Raise Unplaced for a model whose KV is not coded, and where kernels do not work."""
        super().__init__(layout, block_tokens, lossy=lossy)
        try:
            self.device = device or open_device(layout.device)
            pages = [empty_pages(group, 1, block_tokens) for group in layout.groups]
            coders = [
                opened(shape, *_where(each), lossy=lossy)
                for shape, each in zip(self.shapes, pages, strict=True)
            ]
        except Exception as error:  # kernels are compiled and launched here
            raise Unplaced(f"the codec's kernels cannot be used: {error!r}") from error
        self.coders = [coder for coder in coders if coder is not None]
        if len(self.coders) < len(coders):
            raise Unplaced("the codec's kernels do not work on this device: see codec=off above")

    def copier(self, extents: Extents) -> DeviceCodedCopier:
        return DeviceCodedCopier(self, extents)


class OpenedPages(NamedTuple):
    group: int
    coder: DeviceCoder


class DeviceCodedCopier(CodedCopier):
    """By `CodedLanes`, which say what memory they take on the device."""

    encoded_nbytes_max = ENCODED_NBYTES_MAX

    def __init__(self, coding: DeviceCoding, extents: Extents) -> None:
        super().__init__(coding)
        self._coders = coding.coders
        self._pin_thread = partial(pin_this_thread, cpus_near(coding.device.pci_address))
        self._lanes = CodedLanes(coding.device, coding.coders, extents, self._pin_thread)

    @property
    def bounced_nbytes(self) -> int:
        return self._lanes.bounced_nbytes

    def enter_thread(self) -> None:
        self._lanes.device.enter_thread()
        self._pin_thread()

    def mark(self) -> Any:
        return self._lanes.device.mark()

    def open(self, group: int, pages: Pages) -> OpenedPages:
        return OpenedPages(group, self._coders[group].moved(*_where(pages)))

    def encode(
        self, opened: OpenedPages, blocks: Sequence[int], exact: Sequence[bool], after: Any
    ) -> list[OnDevice]:
        return self._lanes.out.encode(opened.group, opened.coder, blocks, after, exact)

    def store(self, opened: OpenedPages, parts: Sequence[tuple[Sized, memoryview]]) -> list[int]:
        staged = [(cast(Staged, record), view) for record, view in parts]
        self._lanes.out.copy_out(opened.group, staged)
        return [record.checksum for record, _ in staged]

    def refine(
        self,
        opened: OpenedPages,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
        after: Any,
    ) -> list[Decoded]:
        loads = [LaneLoad(*each) for each in zip(blocks, records, fines, strict=True)]
        return self._lanes.back.decode(opened.coder, loads, after)

    def wait_reached(self, timeout_s: float) -> bool:
        return self._lanes.registration.wait(timeout_s)

    def close(self) -> None:
        self._lanes.close(CLOSE_WAIT_S)


def _where(pages: Pages) -> tuple[list[Memory], tuple[PagedKV, int], list[list[Place]]]:
    return Memory.of(pages), (open_paged([pages]), 0), places_of(pages)
