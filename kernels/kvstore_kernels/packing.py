"""Gather and scatter of whole batches: blocks of several groups, all layers, one launch.

    record[b] = bytes(layer_0[b]) | bytes(layer_1[b]) | ...      (logical order, as in `paged`)
    checksum  = XXH3-64 over the XXH3-64s of the record's leaves of 64 KiB

On CUDA the kernels of `cuda/paged.cu` move the bytes and compute the leaves' checksums in the same
pass. On CPU tensors the same calls run the plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvstore_kernels.layout import ALIGNMENT, LEAF_NBYTES, Layout, Table
from kvstore_kernels.reference import gather_reference, scatter_reference

if TYPE_CHECKING:
    from kvstore_kernels.cuda.launch import Kernels

Batch = Sequence[tuple[int, int]]
"""(group, block) pairs."""


class Sums:
    """The checksums of a batch's records, on their way from the device."""

    def __init__(self, leaves: Tensor, ends: Sequence[int]) -> None:
        """leaves: of all records, written by what is on the current stream."""
        self._leaves = leaves
        self._ends = ends
        self._written = None
        if leaves.is_cuda:
            self._written = torch.cuda.current_stream(leaves.device).record_event()

    def result(self) -> list[int]:
        """Return one checksum per record. Waits for the device."""
        if self._written is not None:
            self._written.synchronize()  # the caller's stream may be another one by now
        leaves = self._leaves.cpu().numpy().view("<u8")
        return [
            xxhash.xxh3_64_intdigest(leaves[begin:end].tobytes())
            for begin, end in pairwise([0, *self._ends])
        ]


class PagedKV:
    """The KV cache of one worker: groups of layers (B, ..., C), all on one device.

    C is contiguous; the other axes lie as the engine likes, any dtype. Keeps the tensors.
    record_nbytes: per group, of one block.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Raise ValueError for layers that cannot be described, or are on several devices;
        ImportError where CUDA tensors come without CuPy."""
        self._groups = [list(group) for group in groups]
        self._layout = Layout(self._groups)
        devices = {layer.device for group in self._groups for layer in group}
        if len(devices) != 1:
            raise ValueError(f"the layers are on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop()
        self.record_nbytes = self._layout.record_nbytes
        self._kernels: Kernels | None = None
        if self.device.type == "cuda":
            from kvstore_kernels.cuda.launch import Kernels

            self._kernels = Kernels(self.device, self._layout)
        elif self.device.type != "cpu":
            raise ValueError(f"layers on {self.device}; CUDA or the CPU is wanted")

    def offsets(self, batch: Batch) -> list[int]:
        """Return where the record of each pair begins in a buffer, and last, where they all end."""
        records = self._layout.records(batch, 0)
        return [*map(int, records["address"]), _end(records)]

    def gather(self, batch: Batch, staged: Tensor) -> Sums:
        """Pack the blocks of `batch` into `staged`, at `offsets`, and return their checksums.

        staged: 1-D uint8 on the layers' device; valid once the current stream has come to here.
        Raises ValueError for ids out of range and for a buffer that does not fit.
        """
        records = self._records(batch, staged)
        if self._kernels:
            return Sums(self._kernels.launch("gather", records), _ends(records))
        for (group, block), record in zip(batch, self._views(records, staged), strict=True):
            record.copy_(gather_reference(self._groups[group], [block])[0])
        return self._reference_sums(records, staged)

    def scatter(self, staged: Tensor, batch: Batch) -> Sums:
        """Unpack the records in `staged` into the blocks of `batch`; the inverse of `gather`.

        Returns the checksums of the bytes that were unpacked. In addition a pair given twice is a
        ValueError.
        """
        if len(set(batch)) != len(batch):
            raise ValueError("a block is given twice")
        records = self._records(batch, staged)
        if self._kernels:
            return Sums(self._kernels.launch("scatter", records), _ends(records))
        for (group, block), record in zip(batch, self._views(records, staged), strict=True):
            scatter_reference(record[None], self._groups[group], [block])
        return self._reference_sums(records, staged)

    def _records(self, batch: Batch, staged: Tensor) -> Table:
        if staged.device != self.device:
            raise ValueError(f"the buffer is on {staged.device}, the layers on {self.device}")
        if staged.dtype != torch.uint8 or staged.dim() != 1 or not staged.is_contiguous():
            raise ValueError("the buffer is (n,) uint8, contiguous")
        records = self._layout.records(batch, staged.data_ptr())
        if records.size and staged.data_ptr() % 16:
            raise ValueError("the buffer does not begin at a multiple of 16 bytes")
        if records.size and _end(records) - staged.data_ptr() > staged.numel():
            wanted = _end(records) - staged.data_ptr()
            raise ValueError(f"a buffer of {staged.numel()} bytes cannot hold {wanted}")
        return records

    def _views(self, records: Table, staged: Tensor) -> list[Tensor]:
        begins = (records["address"] - staged.data_ptr()).tolist()
        return [
            staged[begin : begin + nbytes]
            for begin, nbytes in zip(begins, records["nbytes"].tolist(), strict=True)
        ]

    def _reference_sums(self, records: Table, staged: Tensor) -> Sums:
        leaves = [
            xxhash.xxh3_64_intdigest(leaf.numpy())
            for record in self._views(records, staged)
            for leaf in record.split(LEAF_NBYTES)
        ]
        return Sums(torch.from_numpy(np.array(leaves, "<u8").view("<i8")), _ends(records))


def _ends(records: Table) -> list[int]:
    """Return behind which leaf each record ends."""
    counts = -(-records["nbytes"].astype(np.int64) // LEAF_NBYTES)
    return [int(end) for end in np.cumsum(counts)]


def _end(records: Table) -> int:
    """Return the address behind the last record, padded as all are."""
    if not records.size:
        return 0
    return int(records["address"][-1]) + -(-int(records["nbytes"][-1]) // ALIGNMENT) * ALIGNMENT
