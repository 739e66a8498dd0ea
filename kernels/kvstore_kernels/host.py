"""The same copies in host memory, for many small pages and a busy interpreter.

A page of a block-compact layout is one run of bytes, and copying it is one memmove. Slices of
memory views do that in 0.2 us plus the copy *without releasing the interpreter lock*, and that is
wanted here: a copy of 32 KiB takes 2 us, but a thread that gives the lock up beside an engine's
busy Python loop waits a switch interval (5 ms) to get it back, for every page. Layouts that scatter
a page go through numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvstore_kernels.paged import page_nbytes


class HostPages:
    """Layers (B, ..., C) in host memory, read and written as records.

    Keeps views of the layers' memory; the caller keeps the tensors alive and in place.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        """Raise ValueError for a layer that is not in host memory or whose C is not contiguous."""
        self._layers = [_Layer(layer) for layer in layers]
        self.record_nbytes = sum(layer.page_nbytes for layer in self._layers)

    def read(self, block: int, record: memoryview) -> None:
        """Copy `block` into `record` (bytes, at least record_nbytes long)."""
        begin = 0
        for layer in self._layers:
            end = begin + layer.page_nbytes
            layer.read(block, record[begin:end])
            begin = end

    def write(self, block: int, record: memoryview) -> None:
        """Copy `record` into `block`."""
        begin = 0
        for layer in self._layers:
            end = begin + layer.page_nbytes
            layer.write(block, record[begin:end])
            begin = end


class _Layer:
    def __init__(self, layer: Tensor) -> None:
        if layer.device.type != "cpu" or layer.dim() < 2 or layer.stride(-1) != 1:
            raise ValueError("a layer is (B, ..., C) in host memory with C contiguous")
        self._pages = layer.view(torch.uint8).numpy()
        self._stride = self._pages.strides[0]
        self.page_nbytes = page_nbytes(layer)
        self._run: memoryview | None = None
        if layer.shape[0] and layer[0].is_contiguous():
            nbytes = (layer.shape[0] - 1) * self._stride + self.page_nbytes
            run = np.lib.stride_tricks.as_strided(self._pages, (nbytes,), (1,))
            self._run = memoryview(run.data)

    def read(self, block: int, page: memoryview) -> None:
        if self._run is not None:
            begin = block * self._stride
            page[:] = self._run[begin : begin + self.page_nbytes]
        else:
            pages = self._pages[block]
            np.copyto(np.frombuffer(page, np.uint8).reshape(pages.shape), pages)

    def write(self, block: int, page: memoryview) -> None:
        if self._run is not None:
            begin = block * self._stride
            self._run[begin : begin + self.page_nbytes] = page
        else:
            pages = self._pages[block]
            np.copyto(pages, np.frombuffer(page, np.uint8).reshape(pages.shape))
