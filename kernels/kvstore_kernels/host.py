"""The same copies in host memory, for many small pages and a busy interpreter.

A page of a block-compact layout is one run of bytes, and copying it is one memmove. Slices of
memory views do that in 0.2 us plus the copy *without releasing the interpreter lock*, and that is
wanted here: a copy of 32 KiB takes 2 us, but a thread that gives the lock up beside an engine's
busy Python loop waits a switch interval (5 ms) to get it back, for every page. A whole batch goes
to the native library in one call, which lets the lock go once. Layouts that scatter a page go
through numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvstore_kernels import native
from kvstore_kernels.native import sums
from kvstore_kernels.paged import page_nbytes

_PAGES = np.dtype([("address", "<u8"), ("stride", "<i8"), ("nbytes", "<u8")])


class HostPages:
    """Layers (B, ..., C) in host memory, read and written as records.

    Keeps views of the layers' memory; the caller keeps the tensors alive and in place.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        """Raise ValueError for a layer that is not in host memory or whose C is not contiguous."""
        self._layers = [_Layer(layer) for layer in layers]
        self.record_nbytes = sum(layer.page_nbytes for layer in self._layers)
        self._places = np.array([layer.place for layer in self._layers], _PAGES)
        self._runs = all(layer.in_runs for layer in self._layers)

    def read_all(
        self,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        checksum: Callable[[memoryview], int],
    ) -> list[int]:
        """Copy each block into its record (of record_nbytes); return the records' checksums."""
        if self._natively(len(blocks)):
            return self._all(blocks, records, to_pages=False)
        for block, record in zip(blocks, records, strict=True):
            self.read(block, record)
        return [checksum(record) for record in records]

    def write_all(
        self,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        checksum: Callable[[memoryview], int],
    ) -> list[int]:
        """Copy each record into its block; return the checksums of what was copied."""
        if self._natively(len(blocks)):
            return self._all(blocks, records, to_pages=True)
        found = []
        for block, record in zip(blocks, records, strict=True):
            self.write(block, record)
            found.append(checksum(record))  # while the bytes are in the processor's cache
        return found

    def _natively(self, count: int) -> bool:
        worthwhile = count * self.record_nbytes >= sums.WORTHWHILE_NBYTES
        return self._runs and worthwhile and native.library() is not None

    def _all(
        self, blocks: Sequence[int], records: Sequence[memoryview], *, to_pages: bool
    ) -> list[int]:
        starts, sizes = (sums.addresses_of if to_pages else sums.places_of)(records)
        if len(blocks) != len(records) or any(sizes != self.record_nbytes):
            raise ValueError(f"a record of these pages has {self.record_nbytes:,} bytes")
        if any(not 0 <= block < layer.blocks for layer in self._layers for block in blocks):
            raise IndexError("there is no such block")
        ids, found = np.array(blocks, np.int64), np.empty(len(blocks), np.uint64)
        leaves = np.empty(-(-self.record_nbytes // sums.LEAF_NBYTES), np.uint64)
        library = native.library()
        assert library is not None
        library.kvstore_pages(
            self._places.ctypes.data,
            len(self._places),
            len(ids),
            ids.ctypes.data,
            starts.ctypes.data,
            int(to_pages),
            found.ctypes.data,
            leaves.ctypes.data,
        )
        return found.tolist()

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
        self.blocks = layer.shape[0]
        self.place = (self._pages.ctypes.data, self._stride, self.page_nbytes)
        self._run: memoryview | None = None
        if layer.shape[0] and layer[0].is_contiguous():
            nbytes = (layer.shape[0] - 1) * self._stride + self.page_nbytes
            run = np.lib.stride_tricks.as_strided(self._pages, (nbytes,), (1,))
            self._run = memoryview(run.data)

    @property
    def in_runs(self) -> bool:
        """Whether a block's page is one run of bytes."""
        return self._run is not None

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
