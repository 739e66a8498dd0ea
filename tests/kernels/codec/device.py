"""The codec's CUDA kernels in the place of a GPU's: compiled for the processor."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore_kernels.codec.coder import Memory
from kvstore_kernels.codec.device_coder import DeviceCoder, Launcher
from kvstore_kernels.packing import PagedKV
from tests.kernels.codec.memory import Pages

SHIM = Path(__file__).parents[1] / "codec_on_host.cpp"


def compile_codec(folder: Path) -> ctypes.CDLL:
    """Compile with the compiler's own checks of undefined behaviour; skip where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    from kvstore_kernels import cuda

    library = folder / "codec.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    options += ["-ffp-contract=off"]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover", "-static-libubsan"]
    include = f"-I{Path(cuda.__file__).parent}"
    subprocess.run(
        [compiler, *options, *checks, include, "-fPIC", "-shared", "-o", library, SHIM], check=True
    )
    return ctypes.CDLL(str(library))


class HostLauncher:
    """In the place of `CodecKernels`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launched: list[str] = []

    def place(self, table: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(table).view(np.uint8).reshape(-1).copy())

    keep = place

    def launch(self, name: str, grid: tuple[int, int], addresses: list[int]) -> None:
        self.launched.append(name)
        run = getattr(self._library, name)
        run(*map(ctypes.c_void_p, addresses), *map(ctypes.c_uint32, grid))


def open_on_host(library: ctypes.CDLL):
    """Return what opens kernels for `DeviceCoder`."""

    def opened(device: torch.device, item: int, width: int) -> Launcher:
        return HostLauncher(library)

    return opened


def device_coder(page: Pages, library: ctypes.CDLL, *, lossy: bool = False) -> DeviceCoder:
    """Return a coder of the pages of codec tests, whose layers are bytes: (blocks, nbytes)."""
    layers = [Memory(each.ctypes.data, each.strides[0]) for each in page.memory]
    paged = PagedKV([[torch.from_numpy(each) for each in page.memory]])
    return DeviceCoder(page.shape, layers, (paged, 0), open_on_host(library), lossy=lossy)


def room(coder: DeviceCoder, count: int, guard: int = 0) -> torch.Tensor:
    """Return staging memory for `count` blocks, with `guard` bytes behind it."""
    nbytes = count * coder.room_nbytes() + guard
    raw = torch.full((nbytes + 64,), 0xAA, dtype=torch.uint8)
    begin = -raw.data_ptr() % 64
    return raw[begin : begin + nbytes]
