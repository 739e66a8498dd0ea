"""Compile the CUDA sources for the device at hand; launch kernels on torch's current stream."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
import torch
from cupy.cuda import compiler, nvrtc
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
            with _on_current_stream(self._device):
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
            _codec_module(*self._what).get_function("seal")  # compiled and loaded now

    def place(self, table: npt.NDArray[np.generic]) -> Tensor:
        return _on_device(table, self._device)

    def keep(self, table: npt.NDArray[np.generic]) -> Tensor:
        return _kept(table, self._device)

    def launch(self, name: str, grid: tuple[int, int], addresses: Sequence[int]) -> None:
        with _on_current_stream(self._device):
            kernel = _codec_module(*self._what).get_function(name)
            kernel(grid, (THREADS,), tuple(map(np.uint64, addresses)))


@cache
def _module(device_index: int) -> Any:
    """Return the module for a device. CuPy keeps what it compiled on disk, by its source."""
    return cupy.RawModule(code=source_of("paged.cu"), options=("--std=c++17",))


@cache
def _codec_module(device_index: int, item: int, width: int) -> Any:
    """As `_module`, compiled by `_compiled`: what CuPy compiles takes numbers below 2^-126 for 0,
    whatever its caller says. A half that is denormal becomes such a number on its way to a float.
    """
    only = (f"-DONLY_ITEM={item}", f"-DONLY_PAIRS={width}")
    return cupy.RawModule(path=str(_compiled(source_of("codec.cu"), only)))


def _compiled(source: str, options: tuple[str, ...]) -> Path:
    """Return the file of a module whose arithmetic is the host's: nothing is contracted or flushed.

    It stands where CuPy keeps its own, by source, options, device and compiler.
    """
    options = ("--std=c++17", "-fmad=false", "-ftz=false", *options)
    device = cupy.cuda.Device().compute_capability
    what = repr((source, options, device, nvrtc.getVersion(), cupy.__version__))
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    file = folder / f"kvstore-{blake2b(what.encode(), digest_size=20).hexdigest()}.cubin"
    if not file.exists():
        module, _ = compiler.compile_using_nvrtc(source, options)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as room:
            made = Path(room) / file.name
            with made.open("wb") as whole:
                whole.write(module)
                whole.flush()
                os.fsync(whole.fileno())
            made.replace(file)  # whole, or not there: others may compile the same
    return file


class _Handle:
    """A stream of torch's, as CuPy takes it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


@contextmanager
def _on_current_stream(device: torch.device) -> Iterator[None]:
    stream = torch.cuda.current_stream(device)
    opened = getattr(cupy.cuda.Stream, "from_external", None)  # since CuPy 14
    with (
        cupy.cuda.Device(device.index),
        opened(_Handle(stream)) if opened else cupy.cuda.ExternalStream(stream.cuda_stream),
    ):
        yield


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
