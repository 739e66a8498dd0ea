"""Files straight into device memory: GPUDirect Storage by way of kvikio, where the machine has it.

Which way is taken is chosen once, when this is opened, and `how` says it:

    gds      kvikio with cuFile: the disk's DMA goes to device memory
    compat   kvikio without: its threads read into pinned memory and copy on from there
    host     no kvikio, or no GPU: one read into host memory, one copy

`file_lane.py` reads records this way, from places in its files that the daemon has lent (the
transformers connector's `direct_storage`); `kvstore bench gpu` measures it. Only `host` without a
GPU is tested: gds and compat follow kvikio's documentation and have not run yet.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

How = Literal["gds", "compat", "host"]

READ_THREADS = 8
"""Reads at once that keep a disk busy."""


class FileReader:
    """Reads parts of files into tensors on one device. Any number of threads may."""

    def __init__(self, device: torch.device) -> None:
        """Raise ValueError for a device that is neither CUDA nor the CPU."""
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"files cannot be read to {device}; CUDA or the CPU is wanted")
        self.how: How = "host"
        self._kvikio: Any = None
        reason = "not a GPU"
        if device.type == "cuda":
            try:
                import kvikio
                from kvikio import cufile_driver

                self._kvikio = kvikio
                # That cuFile could be loaded does not say that the disk's driver takes part.
                compat = kvikio.defaults.is_compat_mode_preferred()
                direct = not compat and cufile_driver.get("is_gds_available")
                self.how = "gds" if direct else "compat"
                reason = f"kvikio {kvikio.__version__}, {_give_threads(kvikio)} threads"
            except Exception as error:  # it loads several libraries, any of which may be absent
                reason = repr(error)
        logger.info("file_reads=%s device=%s reason=%r", self.how, device, reason)

    def open(self, path: Path) -> OpenFile:
        """Open a file for several reads; with cuFile, registering it takes longer than one of them.

        Raises OSError."""
        if self.how == "host":
            return _HostFile(path)
        return _KvikioFile(self._kvikio, path)

    def read(self, path: Path, offset: int, target: Tensor) -> None:
        """Open, read and close: see `OpenFile.read`."""
        with self.open(path) as file:
            file.read(offset, target)


class OpenFile:
    """One file. A context manager, which closes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, offset: int, target: Tensor) -> None:
        """Fill `target`, (n,) uint8 and contiguous, from `offset` of the file; done on return.

        Nothing on the device may be about to use `target`: the bytes come beside all its streams.
        With cuFile, multiples of 4 KiB of offset, length and address are the fast way; what lies
        behind the file's end is not asked for. Raises OSError, EOFError for a file that is too
        short, ValueError for another tensor.
        """
        if target.dtype != torch.uint8 or target.dim() != 1 or not target.is_contiguous():
            raise ValueError("the target is (n,) uint8, contiguous")
        count = self._fill(offset, target)
        if count != len(target):
            raise EOFError(f"{self._path} ended after {count} of {len(target)} bytes from {offset}")

    def close(self) -> None:
        """Close it, when no read is under way."""
        raise NotImplementedError

    def _fill(self, offset: int, target: Tensor) -> int:
        """Return how many bytes there were."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _HostFile(OpenFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def _fill(self, offset: int, target: Tensor) -> int:
        if not target.is_cuda:
            return self._read_all(memoryview(target.numpy()), offset)
        buffer = torch.empty(len(target), dtype=torch.uint8, pin_memory=True)
        count = self._read_all(memoryview(buffer.numpy()), offset)
        target[:count].copy_(buffer[:count])  # waits for the copy
        return count

    def _read_all(self, into: memoryview, offset: int) -> int:
        at = 0
        while at < len(into):
            count = os.preadv(self._fd, [into[at:]], offset + at)
            if not count:
                break
            at += count
        return at


def _give_threads(kvikio: Any) -> int:
    """Let kvikio's pool, of the whole process, have READ_THREADS, or the more it has: by default it
    has one, and whatever is asked for at once is read one after the other. Return how many."""
    threads = int(kvikio.defaults.get("num_threads"))
    if threads < READ_THREADS:
        kvikio.defaults.set({"num_threads": READ_THREADS})
    return max(threads, READ_THREADS)


class _KvikioFile(OpenFile):
    """Through kvikio, which has a RuntimeError for everything, missing and short files included."""

    def __init__(self, kvikio: Any, path: Path) -> None:
        super().__init__(path)
        os.stat(path)  # raises the OSError that says why
        try:
            self._file = kvikio.CuFile(path, "r")
        except RuntimeError as error:
            raise OSError(f"cuFile cannot open {path}: {error}") from error

    def close(self) -> None:
        self._file.close()

    def _fill(self, offset: int, target: Tensor) -> int:
        there = os.fstat(self._file.fileno()).st_size - offset
        if there < len(target):
            return max(0, there)
        try:
            # It waits for the default stream, then reads without the interpreter lock.
            return int(self._file.pread(target, len(target), offset).get())
        except RuntimeError as error:
            raise OSError(f"cuFile cannot read {self._path}: {error}") from error
