"""Gather and scatter of whole batches: blocks of several groups, all layers, one launch.

    record[b] = bytes(layer_0[b]) | bytes(layer_1[b]) | ...      (logical order, as in `paged`)
    checksum  = XXH3-64 over the XXH3-64s of the record's leaves of 64 KiB

On CUDA the kernels of `cuda/paged.cu` move the bytes and compute the leaves' checksums in the same
pass; where they cannot be had, torch moves them, layer by layer, and nobody sums up. On CPU tensors
the same calls run the plain reference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvstore_kernels import native
from kvstore_kernels.layout import ALIGNMENT, LEAF_NBYTES, Layout, Table
from kvstore_kernels.native import sums as native_sums
from kvstore_kernels.paged import gather_blocks, scatter_blocks
from kvstore_kernels.reference import gather_reference, scatter_reference

if TYPE_CHECKING:
    from kvstore_kernels.cuda.launch import Kernels

logger = logging.getLogger(__name__)

Batch = Sequence[tuple[int, int]]
"""(group, block) pairs."""
Leaves = list[bytes]
"""Of each record, the checksums of its leaves, 8 bytes each."""


class Sums:
    """The checksums of a batch's records, on their way from the device."""

    def __init__(self, leaves: Tensor, ends: Sequence[int], keeps: object = None) -> None:
        """leaves: of all records, written by what is on the current stream, which copies them.
        keeps: what that reads; it must not be freed before."""
        self._keeps = keeps
        self._leaves = leaves
        self._ends = ends
        self._written = None
        if leaves.is_cuda:
            # On this stream: a copy asked for later would queue up behind the caller's own work.
            self._leaves = torch.empty(leaves.shape, dtype=leaves.dtype, pin_memory=True)
            self._leaves.copy_(leaves, non_blocking=True)
            self._written = torch.cuda.current_stream(leaves.device).record_event()

    def leaves(self) -> Leaves:
        """Return the leaves' checksums of each record. Waits for the device."""
        if self._written is not None:
            self._written.synchronize()
        found = self._leaves.numpy().view("<u8")
        return [found[begin:end].tobytes() for begin, end in pairwise([0, *self._ends])]

    def result(self) -> list[int]:
        """Return one checksum per record. Waits for the device."""
        return [checksum_of_leaves(leaves) for leaves in self.leaves()]


def leaves_of(record: Tensor) -> bytes:
    """Return the checksums of the leaves of a record in host memory, (n,) uint8."""
    if record.numel() >= native_sums.WORTHWHILE_NBYTES and native.library() is not None:
        return np.array(native_sums.leaves_of(record.numpy().data), "<u8").tobytes()
    sums = [xxhash.xxh3_64_intdigest(leaf.numpy()) for leaf in record.split(LEAF_NBYTES)]
    return np.array(sums, "<u8").tobytes()


def checksum_of_leaves(leaves: bytes) -> int:
    """Return a record's checksum."""
    return xxhash.xxh3_64_intdigest(leaves)


class PagedKV:
    """The KV cache of one worker: groups of layers (B, ..., C), all on one device.

    C is contiguous; the other axes lie as the engine likes, any dtype. Keeps the tensors.
    record_nbytes: per group, of one block. sums: whether it computes checksums.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], *, kernels: bool = True) -> None:
        """kernels: False for torch's copies. Raises ValueError for layers that cannot be described,
        or are on several devices; ImportError for kernels where CUDA tensors come without CuPy."""
        self._groups = [list(group) for group in groups]
        self._layout = Layout(self._groups)
        devices = {layer.device for group in self._groups for layer in group}
        if len(devices) != 1:
            raise ValueError(f"the layers are on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop()
        self.record_nbytes = self._layout.record_nbytes
        self.sums = kernels
        self._kernels: Kernels | None = None
        if self.device.type == "cuda":
            if kernels:
                from kvstore_kernels.cuda.launch import Kernels

                self._kernels = Kernels(self.device, self._layout)
        elif self.device.type != "cpu":
            raise ValueError(f"layers on {self.device}; CUDA or the CPU is wanted")

    def offsets(self, batch: Batch) -> list[int]:
        """Return where the record of each pair begins in a buffer, and last, where they all end."""
        records = self._layout.records(batch, 0)
        return [*map(int, records["address"]), _end(records)]

    def check_blocks(self, batch: Batch) -> None:
        """Raise ValueError for ids out of range."""
        self._layout.records(batch, 0)

    def gather(
        self, batch: Batch, staged: Tensor, offsets: Sequence[int] | None = None
    ) -> Sums | None:
        """Pack the blocks of `batch` into `staged`, and return their checksums, if it has any.

        staged: 1-D uint8 on the layers' device; valid once the current stream has come to here.
        offsets: where each record begins, multiples of 16; default: those of `offsets`.
        Raises ValueError for ids out of range and for a buffer that does not fit.
        """
        records = self._records(batch, staged, offsets)
        if self._kernels:
            return Sums(self._kernels.launch("gather", records), _ends(records), self._kernels)
        if not self.sums:
            for group, blocks, rows in self._runs(batch, records, staged):
                gather_blocks(self._groups[group], blocks, rows)
            return None
        for (group, block), record in zip(batch, self._views(records, staged), strict=True):
            record.copy_(gather_reference(self._groups[group], [block])[0])
        return self._reference_sums(records, staged)

    def scatter(
        self, staged: Tensor, batch: Batch, offsets: Sequence[int] | None = None
    ) -> Sums | None:
        """Unpack the records in `staged` into the blocks of `batch`; the inverse of `gather`.

        Returns the checksums of the bytes that were unpacked. In addition a pair given twice is a
        ValueError.
        """
        if len(set(batch)) != len(batch):
            raise ValueError("a block is given twice")
        records = self._records(batch, staged, offsets)
        if self._kernels:
            return Sums(self._kernels.launch("scatter", records), _ends(records), self._kernels)
        with torch.inference_mode():  # pages that were made in it can only be written in it
            if not self.sums:
                for group, blocks, rows in self._runs(batch, records, staged):
                    scatter_blocks(rows, self._groups[group], blocks)
                return None
            for (group, block), record in zip(batch, self._views(records, staged), strict=True):
                scatter_reference(record[None], self._groups[group], [block])
        return self._reference_sums(records, staged)

    def _records(self, batch: Batch, staged: Tensor, offsets: Sequence[int] | None) -> Table:
        if staged.device != self.device:
            raise ValueError(f"the buffer is on {staged.device}, the layers on {self.device}")
        if staged.dtype != torch.uint8 or staged.dim() != 1 or not staged.is_contiguous():
            raise ValueError("the buffer is (n,) uint8, contiguous")
        records = self._layout.records(batch, staged.data_ptr())
        if offsets is not None:
            if len(offsets) != len(batch) or any(at < 0 or at % 16 for at in offsets):
                raise ValueError("one offset per block is wanted, each a multiple of 16")
            records["address"] = staged.data_ptr() + np.asarray(offsets, np.uint64)
        if records.size and staged.data_ptr() % 16:
            raise ValueError("the buffer does not begin at a multiple of 16 bytes")
        wanted = int((records["address"] + records["nbytes"]).max(initial=0)) - staged.data_ptr()
        if wanted > staged.numel():
            raise ValueError(f"a buffer of {staged.numel()} bytes cannot hold {wanted}")
        return records

    def _views(self, records: Table, staged: Tensor) -> list[Tensor]:
        begins = (records["address"] - staged.data_ptr()).tolist()
        return [
            staged[begin : begin + nbytes]
            for begin, nbytes in zip(begins, records["nbytes"].tolist(), strict=True)
        ]

    def _runs(
        self, batch: Batch, records: Table, staged: Tensor
    ) -> Iterator[tuple[int, list[int], Tensor]]:
        """Yield (group, blocks, rows) for records of one group that lie at equal distances."""
        begins = (records["address"] - staged.data_ptr()).tolist()
        first = 0
        while first < len(batch):
            group, last = batch[first][0], first + 1
            step = begins[last] - begins[first] if last < len(batch) else 0
            while (
                last < len(batch)
                and batch[last][0] == group
                and begins[last] - begins[last - 1] == step > 0
            ):
                last += 1
            nbytes = self.record_nbytes[group]
            rows = staged.as_strided(
                (last - first, nbytes),
                (max(step, nbytes), 1),
                staged.storage_offset() + begins[first],
            )
            yield group, [block for _, block in batch[first:last]], rows
            first = last

    def _reference_sums(self, records: Table, staged: Tensor) -> Sums:
        leaves = b"".join(map(leaves_of, self._views(records, staged)))
        return Sums(torch.from_numpy(np.frombuffer(leaves, "<i8").copy()), _ends(records))


def open_paged(groups: Sequence[Sequence[Tensor]]) -> PagedKV:
    """Return the fastest `PagedKV` that is known to work on the device of `groups`."""
    device = groups[0][0].device
    return PagedKV(groups, kernels=device.type != "cuda" or kernels_work(device))


@cache
def kernels_work(device: torch.device) -> bool:
    """Try the kernels on scratch tensors, once per process; False, with the reason in the log,
    where they cannot be compiled or do not equal the reference."""
    try:
        _try_kernels(device)
    except Exception as error:
        logger.warning("kernels=off device=%s reason=%r copies='torch, slower'", device, error)
        return False
    logger.info("kernels=on device=%s", device)
    return True


def _try_kernels(device: torch.device) -> None:
    """Raise ValueError unless gather and scatter give the reference's bytes and checksums."""
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in (((3, 5, 2, 16, 128), torch.bfloat16), ((2, 5, 3, 7, 5), torch.float32)):
        raw = torch.randint(
            0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator
        )
        kv = raw.to(torch.uint8).view(dtype).view(shape)
        plain, layers = list(kv.transpose(2, 3)), list(kv.to(device, copy=True).transpose(2, 3))
        paged, reference = PagedKV([layers]), PagedKV([plain])
        out, back = [(0, 4), (0, 0), (0, 3)], [(0, 1), (0, 2), (0, 4)]
        expected = torch.zeros(reference.offsets(out)[-1], dtype=torch.uint8)
        staged = expected.to(device, copy=True)
        for found, right in (
            (paged.gather(out, staged), reference.gather(out, expected)),
            (paged.scatter(staged, back), reference.scatter(expected, back)),
        ):
            assert found is not None
            assert right is not None
            if found.result() != right.result():
                raise ValueError(f"wrong checksums of {shape} {dtype}")
        pairs = [(staged, expected), *zip(layers, plain, strict=True)]
        for mine, right in pairs:
            if not torch.equal(_bytes_of(mine), _bytes_of(right)):
                raise ValueError(f"wrong bytes of {shape} {dtype}")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def _ends(records: Table) -> list[int]:
    """Return behind which leaf each record ends."""
    counts = -(-records["nbytes"].astype(np.int64) // LEAF_NBYTES)
    return [int(end) for end in np.cumsum(counts)]


def _end(records: Table) -> int:
    """Return the address behind the last record, padded as all are."""
    if not records.size:
        return 0
    return int(records["address"][-1]) + -(-int(records["nbytes"][-1]) // ALIGNMENT) * ALIGNMENT
