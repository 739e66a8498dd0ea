"""Compile `paged.cu` for the device at hand and launch its kernels on torch's current stream."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np
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
        # Launches come on any stream, and the current one may be busy with a model for long.
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            self._layers = _on_device(layout.layers, device)
        stream.synchronize()
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


@cache
def _module(device_index: int) -> Any:
    """Return the module for a device. CuPy keeps what it compiled on disk, by its source."""
    return cupy.RawModule(code=source_of("paged.cu"), options=("--std=c++17",))


def _on_device(table: Table, device: torch.device) -> Tensor:
    """Copy a table to the device, in the order of the current stream, and wait for nothing."""
    return torch.from_numpy(table.view(np.uint8)).pin_memory().to(device, non_blocking=True)
