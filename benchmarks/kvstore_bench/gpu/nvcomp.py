"""nvCOMP's ANS on the tensors that our kernels code, where nvCOMP's Python package is installed.

`pip install nvidia-nvcomp-cu12` (or -cu13). It is a peer to compare with and nothing else: it codes
without loss in pieces of 64 KiB, no record can be told from another, and only a GPU decodes it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from kvstore_bench.gpu.clock import alternated, host_seconds

logger = logging.getLogger(__name__)

PACKAGE = "nvidia.nvcomp"
TYPES = {"|u1": torch.uint8, "<f2": torch.float16}
"""How it may look at values of two bytes: as bytes, or as numbers of 16 bits."""


def measure_nvcomp_ans(
    layers: Sequence[torch.Tensor], batch: int, rounds: int
) -> dict[str, Any] | None:
    """Return `ratio`, `encode_gb_s`, `decode_gb_s` in raw bytes, and the `data_type` that was
    smaller, for the first `batch` blocks of layers (B, ...).

    None where nvCOMP is not installed or fails; the log says so."""
    try:
        nvcomp = import_module(PACKAGE)
    except Exception as error:  # it loads CUDA: whatever it says, it cannot be had here
        logger.info("nvcomp=absent reason=%r", error)
        return None
    values = torch.cat([layer[:batch].reshape(-1) for layer in layers])
    measured = []
    for kind, dtype in TYPES.items():
        try:
            measured.append(_measure(nvcomp, values.view(dtype), kind, rounds))
        except Exception as error:  # another one's package, called as its version 6.0 documents it
            logger.warning("nvcomp=failed data_type=%s reason=%r", kind, error)
    return max(measured, key=itemgetter("ratio"), default=None)


def _measure(nvcomp: Any, values: torch.Tensor, kind: str, rounds: int) -> dict[str, Any]:
    stream = torch.cuda.current_stream().cuda_stream if values.is_cuda else 0
    codec = nvcomp.Codec(algorithm="ANS", data_type=kind, cuda_stream=stream)
    source = nvcomp.as_array(values, cuda_stream=stream)
    coded = codec.encode(source)
    back = np.frombuffer(bytes(codec.decode(coded).cpu()), np.uint8)
    if not np.array_equal(back, values.view(torch.uint8).cpu().numpy()):
        raise ValueError("what was decoded is not what was encoded")
    sides = {"encode": partial(codec.encode, source), "decode": partial(codec.decode, coded)}
    seconds = alternated(sides, rounds, host_seconds)
    return {
        "ratio": values.nbytes / coded.buffer_size,
        "encode_gb_s": values.nbytes / 1e9 / seconds["encode"],
        "decode_gb_s": values.nbytes / 1e9 / seconds["decode"],
        "data_type": kind,
    }
