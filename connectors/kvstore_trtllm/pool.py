"""The blocks of one rank's KV pool as bytes: to and from host memory.

A block of TensorRT-LLM's pool, all its layers, is one run of bytes. In host memory it is copied as
it is; on a GPU by the copy engine, out through a pinned buffer on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_BUFFER_NBYTES = 32 << 20


class Pool:
    """The registered tensor. One thread writes to it, one reads from it."""

    def __init__(self, pool: torch.Tensor) -> None:
        """pool: (blocks, ...), contiguous."""
        self._blocks = pool.view(torch.uint8).view(pool.shape[0], -1)
        self._on_gpu = pool.is_cuda
        self._stream: Any = None
        self._buffer: torch.Tensor | None = None

    @property
    def record_nbytes(self) -> int:
        return int(self._blocks.shape[1])

    @property
    def read_max(self) -> int:
        """How many blocks `read` takes."""
        return max(1, _BUFFER_NBYTES // self.record_nbytes)

    def mark(self, stream: Any) -> Any:
        """Return the point that a stream has reached; a read `after` it sees that work done."""
        return stream.record_event() if self._on_gpu else None

    def write(self, blocks: Sequence[int], records: memoryview, stream: Any) -> None:
        """Copy records, one after the other, into blocks, before what the stream does next.

        The records are not needed any more when this returns.
        """
        rows = torch.frombuffer(records, dtype=torch.uint8).view(len(blocks), -1)
        on: AbstractContextManager[Any] = (
            torch.cuda.stream(stream) if self._on_gpu else nullcontext()
        )
        with on:
            for block, row in zip(blocks, rows, strict=True):
                # Of pageable memory, CUDA has taken its own copy when this returns.
                self._blocks[block].copy_(row, non_blocking=True)

    def read(self, blocks: Sequence[int], after: Any) -> list[memoryview]:
        """Return the bytes of `read_max` blocks at most, in memory that the next call uses, too."""
        if self._buffer is None:
            nbytes = self.read_max * self.record_nbytes
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        rows = self._buffer.view(-1, self.record_nbytes)[: len(blocks)]
        if self._on_gpu:
            self._read_by_stream(blocks, rows, after)
        else:
            for block, row in zip(blocks, rows, strict=True):
                row.copy_(self._blocks[block])
        return [memoryview(row.numpy()) for row in rows]

    def _read_by_stream(self, blocks: Sequence[int], rows: torch.Tensor, after: Any) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._blocks.device)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for block, row in zip(blocks, rows, strict=True):
                row.copy_(self._blocks[block], non_blocking=True)
        self._stream.synchronize()
