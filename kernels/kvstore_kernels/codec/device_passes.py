"""Passes of blocks through the kernels of `device_coder`, and what has come of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_kernels.codec.copies import Decoded
from kvstore_kernels.codec.device_tables import RECORD, RESULT, Table
from kvstore_kernels.codec.record import DType, Form
from kvstore_kernels.layout import ALIGNMENT

if TYPE_CHECKING:
    from kvstore_kernels.codec.device_coder import DeviceCoder


class Staged(NamedTuple):
    """A record in staging memory: bytes [begin, begin + nbytes), and their checksum."""

    begin: int
    nbytes: int
    checksum: int


class OnDevice(NamedTuple):
    """One block's records. fine: of a lossy block. uncoded: the base is raw."""

    base: Staged
    fine: Staged | None = None
    uncoded: bool = False


class Arrived(NamedTuple):
    """Records to decode, as they lie in staging memory: where they begin, multiples of 16, and
    their bytes. fine_checksum: what the fine part's has to be. fine_nbytes 0: there is none."""

    begin: int
    nbytes: int
    fine_begin: int = 0
    fine_nbytes: int = 0
    fine_checksum: int = 0


class Batch(NamedTuple):
    size: int
    tensors: tuple[Tensor, Tensor, Tensor]
    """Records, results, leaves."""


class _Coming:
    """Results of a batch, on their way from the device."""

    def __init__(self, batch: Batch, *kept: Tensor) -> None:
        """kept: what the kernels still use."""
        results = batch.tensors[1]
        self._kept = (batch, *kept)
        self._results, self._written = results, None
        if results.is_cuda:
            self._results = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            self._results.copy_(results, non_blocking=True)
            self._written = torch.cuda.current_stream(results.device).record_event()

    def result(self) -> Table:
        """Return them. Waits for the device."""
        if self._written is not None:
            self._written.synchronize()
        found: Table = self._results.numpy().view(RESULT)
        return found


class Encoding:
    """Blocks under way into staging memory; made, it has put its first pass on the stream."""

    def __init__(
        self,
        coder: DeviceCoder,
        blocks: Sequence[int],
        staged: Tensor,
        at: int,
        exact: Sequence[bool],
    ) -> None:
        coder.check(blocks, staged)
        room = coder.room_nbytes()
        if len(exact) != len(blocks) or at % 16 or at + len(blocks) * room > len(staged):
            raise ValueError(
                f"{len(blocks)} records need {len(blocks) * room:,} bytes from {at} on"
            )
        self._coder, self._blocks, self._staged = coder, blocks, staged
        self._bases = [at + index * room for index in range(len(blocks))]
        self._done: dict[int, OnDevice] = {}
        self._refused: list[int] = []
        self._larger: list[int] = []
        self.passes = 0
        """How many there were: 1, unless blocks did not fit the form that was tried first."""
        lossy = [index for index, each in enumerate(exact) if not each]
        self._under_way: list[tuple[list[int], _Coming, Form]] = []
        self._lossy(lossy)
        self._exact([index for index, each in enumerate(exact) if each])

    def left(self) -> bool:
        """Wait for the pass that is under way; say whether `next_pass` has anything to do."""
        under_way, self._under_way = self._under_way, []
        for indices, coming, form in under_way:
            for index, result in zip(indices, coming.result(), strict=True):
                if result["wrong"]:
                    self._refused.append(index)
                elif not result["stored"]:
                    self._larger.append(index)
                else:
                    self._done[index] = self._made(index, result, form)
        return bool(self._refused or self._larger)

    def next_pass(self) -> None:
        """Put on the current stream what is left to do."""
        refused, self._refused = self._refused, []
        larger, self._larger = self._larger, []
        self._exact(refused)
        self._raw(larger)

    def records(self) -> list[OnDevice]:
        """Return the records, by block; nothing is left to do."""
        return [self._done[index] for index in range(len(self._blocks))]

    def finish(self) -> list[OnDevice]:
        """Do all passes on the current stream, and return the records. Waits for the device."""
        while self.left():
            self.next_pass()
        return self.records()

    def _made(self, index: int, result: np.void, form: Form) -> OnDevice:
        begin = self._bases[index]
        base = Staged(begin, int(result["stored"]), int(result["sum"]))
        if form is not Form.EP_BASE:
            return OnDevice(base, uncoded=form is Form.RAW)
        fine_begin = begin + padded(self._coder.record_nbytes)
        return OnDevice(base, Staged(fine_begin, self._coder.fine_nbytes, int(result["fine_sum"])))

    def _records(self, indices: Sequence[int]) -> Table:
        records = np.zeros(len(indices), RECORD)
        records["block"] = [self._blocks[index] for index in indices]
        bases = np.array([self._bases[index] for index in indices], np.uint64)
        records["base"] = np.uint64(self._staged.data_ptr()) + bases
        return records

    def _lossy(self, indices: list[int]) -> None:
        if not indices:
            return
        records = self._records(indices)
        records["fine"] = records["base"] + np.uint64(padded(self._coder.record_nbytes))
        batch = self._coder.batch(records)
        self._coder.run(["ep_encode", "sums", "seal", "fine_sums", "fine_seal"], batch)
        self._put(indices, _Coming(batch), Form.EP_BASE)

    def _exact(self, indices: list[int]) -> None:
        if not indices:
            return
        if self._coder.shape.dtype is DType.FP16:
            self._raw(indices)
            return
        records = self._records(indices)
        scratch = self._coder.scratch(records)
        batch = self._coder.batch(records)
        self._coder.run(["l3_encode", "l3_tail", "sums", "seal"], batch)
        self._put(indices, _Coming(batch, scratch), Form.L3)

    def _raw(self, indices: list[int]) -> None:
        if not indices:
            return
        blocks, begins = ([values[index] for index in indices] for values in
                          (self._blocks, self._bases))  # fmt: skip
        self._coder.gather_raw(blocks, self._staged, begins)
        results = np.zeros(len(indices), RESULT)
        results["nbytes"] = results["stored"] = self._coder.record_nbytes
        batch = self._coder.batch(self._records(indices), results)
        self._coder.run(["sums", "seal"], batch)
        self._put(indices, _Coming(batch), Form.RAW)

    def _put(self, indices: list[int], coming: _Coming, form: Form) -> None:
        if not self._under_way:
            self.passes += 1
        self._under_way.append((indices, coming, form))


class Decoding:
    """Records under way into blocks."""

    def __init__(
        self,
        coder: DeviceCoder,
        blocks: Sequence[int],
        staged: Tensor,
        arrived: Sequence[Arrived],
    ) -> None:
        coder.check(blocks, staged)
        if len(set(blocks)) != len(blocks) or len(blocks) != len(arrived):
            raise ValueError(f"{len(arrived)} records for {len(set(blocks))} blocks")
        self._coder, self._blocks, self._staged, self._arrived = coder, blocks, staged, arrived
        records = np.zeros(len(blocks), RECORD)
        for row, block, each in zip(records, blocks, arrived, strict=True):
            _inside(each.begin, each.nbytes, coder.record_nbytes, staged)
            row["block"], row["base"] = block, staged.data_ptr() + each.begin
            row["nbytes"] = each.nbytes
            if each.fine_nbytes:
                _inside(each.fine_begin, each.fine_nbytes, coder.fine_nbytes, staged)
                row["fine"], row["fine_nbytes"] = (
                    staged.data_ptr() + each.fine_begin,
                    each.fine_nbytes,
                )
                row["fine_sum"] = each.fine_checksum
        batch = coder.batch(records)
        names = ["record_sums", "inspect"]
        names += ["l3_decode"] if coder.shape.dtype is not DType.FP16 else []
        names += ["ep_decode"] if coder.lossy else []
        coder.run(names, batch)
        self._coming = _Coming(batch)
        self._results: Table | None = None

    def left(self) -> bool:
        """Wait for the kernels; say whether `next_pass` has anything to do: raw records."""
        self._results = self._coming.result()
        return bool((self._results["form"] == Form.RAW).any())

    def next_pass(self) -> None:
        """Put the copies of raw records on the current stream."""
        assert self._results is not None
        raw = np.flatnonzero(self._results["form"] == Form.RAW).tolist()
        blocks, begins = [self._blocks[i] for i in raw], [self._arrived[i].begin for i in raw]
        self._coder.scatter_raw(blocks, self._staged, begins)

    def found(self) -> list[Decoded]:
        """Return what the records were, by block, as `CodedCopies.refine` does; after `left`.

        A block whose base has a wrong checksum, or is None, holds anything."""
        assert self._results is not None
        return [
            Decoded(
                int(row["sum"]) if row["form"] and not row["wrong"] else None,
                bool(row["refined"]) if each.fine_nbytes else None,
            )
            for row, each in zip(self._results, self._arrived, strict=True)
        ]

    def finish(self) -> list[Decoded]:
        """Do everything on the current stream, and return `found`. Waits for the kernels; raw
        records are in their blocks once the current stream has come to here."""
        if self.left():
            self.next_pass()
        return self.found()


def _inside(begin: int, nbytes: int, most: int, staged: Tensor) -> None:
    if begin < 0 or begin % 16 or not 0 <= nbytes <= most or begin + nbytes > len(staged):
        raise ValueError(f"a record of {nbytes} bytes, at most {most}, at {begin} of {len(staged)}")


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
