"""Memory of the arena as tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor


def tensor_of(view: memoryview) -> Tensor:
    """Return the bytes of a view, (n,) uint8, without a copy; the view lives as long as the tensor.

    What a read-only view shows (of a sealed arena) must only be read: torch has no such tensors and
    would warn, and a write would end the process.
    """
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    address = np.frombuffer(view, np.uint8).ctypes.data
    shown = (ctypes.c_uint8 * view.nbytes).from_address(address)
    shown._view = view  # type: ignore[attr-defined]  # keeps it mapped
    return torch.frombuffer(shown, dtype=torch.uint8)
