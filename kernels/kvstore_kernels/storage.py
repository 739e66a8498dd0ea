"""Files straight into device memory: GPUDirect Storage by way of kvikio, where the machine has it.

Which way is taken is chosen once, when this is opened, and `how` says it:

    gds      kvikio with cuFile: the disk's DMA goes to device memory
    compat   kvikio without: its threads read into pinned memory and copy on from there
    host     no kvikio, or no GPU: one read into host memory, one copy

No engine's path uses it yet: the daemon would have to lend out places in its files, as it lends
slots of the arena. `kvstore bench gpu` measures what that would be worth. Not run on a GPU yet.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

How = Literal["gds", "compat", "host"]


class FileReader:
    """Reads parts of files into tensors on one device."""

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
                reason = f"kvikio {kvikio.__version__}"
            except Exception as error:  # it loads several libraries, any of which may be absent
                reason = repr(error)
        logger.info("file_reads=%s device=%s reason=%r", self.how, device, reason)

    def read(self, path: Path, offset: int, target: Tensor) -> None:
        """Fill `target`, (n,) uint8 and contiguous, from `offset` of a file; done on return.

        Raises OSError, EOFError for a file that is too short, ValueError for another tensor.
        """
        if target.dtype != torch.uint8 or target.dim() != 1 or not target.is_contiguous():
            raise ValueError("the target is (n,) uint8, contiguous")
        if self.how == "host":
            buffer = torch.empty(len(target), dtype=torch.uint8, pin_memory=target.is_cuda)
            with path.open("rb", buffering=0) as file:
                count = _read_all(file.fileno(), memoryview(buffer.numpy()), offset)
            target[:count].copy_(buffer[:count])
        else:
            with self._kvikio.CuFile(path, "r") as file:
                count = file.pread(target, len(target), offset).get()
        if count != len(target):
            raise EOFError(f"{path} ended after {count} of {len(target)} bytes from {offset}")


def _read_all(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into`; return how many bytes there were."""
    at = 0
    while at < len(into):
        count = os.preadv(fd, [into[at:]], offset + at)
        if not count:
            break
        at += count
    return at
