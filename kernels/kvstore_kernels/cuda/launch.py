"""Compile the CUDA sources for the device at hand; launch kernels on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_kernels.cuda.source import source_of
from kvstore_kernels.layout import LEAF_NBYTES, Layout, Table

THREADS = 256
LEAVES_MAX = 65535  # the second axis of a CUDA grid: records of 4 GiB


class Kernels:
    """The kernels of one device, for the layers of one layout."""

    def __init__(self, device: torch.device, layout: Layout) -> None:
        self._device = device
        self._word = layout.word
        self._layers = _kept(layout.layers, device)
        if max(layout.record_nbytes) > LEAVES_MAX * LEAF_NBYTES:
            raise ValueError(f"records of {max(layout.record_nbytes):,} bytes are too large")
        with cupy.cuda.Device(device.index):
            _module(device.index).compile()  # now, before anybody waits for it

    def launch(self, name: str, records: Table) -> Tensor:
        """Launch "gather" or "scatter"; return the leaves' checksums, as int64, on the device."""
        counts = -(-records["nbytes"].astype(np.int64) // LEAF_NBYTES)
        sums = torch.empty(int(counts.sum()), dtype=torch.int64, device=self._device)
        if records.size:
            table = _on_device(records, self._device)
            stream = torch.cuda.current_stream(self._device).cuda_stream
            with cupy.cuda.Device(self._device.index), cupy.cuda.ExternalStream(stream):
                kernel = _module(self._device.index).get_function(f"{name}_{self._word}")
                pointers = [np.uint64(each.data_ptr()) for each in (self._layers, table, sums)]
                kernel((records.size, int(counts.max())), (THREADS,), tuple(pointers))
        return sums


class CodecKernels:
    """The kernels of `codec.cu` on one device, for one kind of values and one width of EP's.

    item: 1 bfloat16, 2 float16, 4 float32. width: pairs of channels that a lane holds. A
    `LauncherOf` of `codec/device_coder.py`.
    """

    def __init__(self, device: torch.device, item: int, width: int) -> None:
        self._device = device
        self._what = (device.index, item, width)
        with cupy.cuda.Device(device.index):
            _codec_module(*self._what).compile()

    def place(self, table: npt.NDArray[np.generic]) -> Tensor:
        return _on_device(table, self._device)

    def keep(self, table: npt.NDArray[np.generic]) -> Tensor:
        return _kept(table, self._device)

    def launch(self, name: str, grid: tuple[int, int], addresses: Sequence[int]) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with cupy.cuda.Device(self._device.index), cupy.cuda.ExternalStream(stream):
            kernel = _codec_module(*self._what).get_function(name)
            kernel(grid, (THREADS,), tuple(map(np.uint64, addresses)))


@cache
def _module(device_index: int) -> Any:
    """Return the module for a device. CuPy keeps what it compiled on disk, by its source."""
    return cupy.RawModule(code=source_of("paged.cu"), options=("--std=c++17",))


@cache
def _codec_module(device_index: int, item: int, width: int) -> Any:
    """As `_module`; the codec's arithmetic is the host's only if nothing is contracted."""
    only = (f"-DONLY_ITEM={item}", f"-DONLY_PAIRS={width}")
    return cupy.RawModule(code=source_of("codec.cu"), options=("--std=c++17", "-fmad=false", *only))


def _kept(table: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a table to the device for all streams; the current one may be busy for long."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        placed = _on_device(table, device)
    stream.synchronize()
    return placed


def _on_device(table: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a table to the device, in the order of the current stream, and wait for nothing."""
    flat = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).pin_memory().to(device, non_blocking=True)
