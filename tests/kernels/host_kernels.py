"""The CUDA kernels' own source, compiled for the processor: the same launches, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore_kernels.layout import LEAF_NBYTES, Layout, Table
from kvstore_kernels.packing import PagedKV

SHIM = Path(__file__).with_name("on_host.cpp")


def compile_for_host(folder: Path) -> ctypes.CDLL:
    """Compile with bounds and overflow checks of the compiler's; skip where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    from kvstore_kernels import cuda

    library = folder / "kernels.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover", "-static-libubsan"]
    include = f"-I{Path(cuda.__file__).parent}"
    subprocess.run(
        [compiler, *options, *checks, include, "-fPIC", "-shared", "-o", library, SHIM], check=True
    )
    return ctypes.CDLL(str(library))


class HostKernels:
    """In the place of `Kernels`."""

    def __init__(self, library: ctypes.CDLL, layout: Layout) -> None:
        self._library = library
        self._layers = layout.layers
        self._word = layout.word

    def launch(self, name: str, records: Table) -> torch.Tensor:
        counts = -(-records["nbytes"].astype(np.int64) // LEAF_NBYTES)
        sums = np.zeros(int(counts.sum()), np.int64)
        run = getattr(self._library, f"{name}_{self._word}")
        pointers = [ctypes.c_void_p(table.ctypes.data) for table in (self._layers, records, sums)]
        run(*pointers, ctypes.c_uint32(records.size))
        return torch.from_numpy(sums)


def on_host(groups, library: ctypes.CDLL) -> PagedKV:
    """Return the pages of CPU tensors, moved by the kernels instead of the reference."""
    paged = PagedKV(groups)
    paged._kernels = HostKernels(library, paged._layout)
    return paged
