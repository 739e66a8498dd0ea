"""Blocks of KV for benchmarks that move many of them: a model's, or made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore_bench.codec.kv import Bits, Blocks, computed
from kvstore_kernels.codec.record import DType
from kvstore_kernels.codec.reference import of_float

Say = Callable[[str], None]

LAYERS, HEADS, CHANNELS = 18, 1, 256  # Gemma 3 270M
BLOCK_TOKENS = 16
LAYER_NBYTES = 4 * HEADS * CHANNELS * BLOCK_TOKENS  # of a made-up block: keys and values
TEXT_TOKENS = 2048
SPREAD = 1.5  # of the channels' sizes, in powers of two: coded, it is as large as a model's KV


def made_up(tokens: int, layers: int = LAYERS, seed: int = 0) -> list[Bits]:
    """Return KV like a model's: (heads, tokens, channels) for each layer's keys, then values.

    Every channel has a size of its own, and is drawn from a normal distribution.
    """
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(2 * layers):
        scale = np.exp2(draw.normal(0, SPREAD, CHANNELS)).astype(np.float32)
        x = draw.standard_normal((HEADS, tokens, CHANNELS), np.float32) * scale
        parts.append(of_float(x, DType.BF16).astype(np.uint16))
    return parts


def blocks_of(nbytes: int, model: Path | None, say: Say, *, block_nbytes: int = 0) -> Blocks:
    """Return blocks of at least `nbytes`: of texts that `model` reads, again and again, or made up.

    The model needs torch and transformers. block_nbytes: about how large a made-up block is.
    """
    if model is None:
        parts = made_up(TEXT_TOKENS, block_nbytes // LAYER_NBYTES or LAYERS)
    else:
        texts = [kv.parts for kv in computed(model, TEXT_TOKENS, say).values()]
        parts = [np.concatenate(each, axis=1) for each in zip(*texts, strict=True)]
    tokens = parts[0].shape[1]
    wanted = -(-nbytes * tokens // sum(part.nbytes for part in parts))
    wanted = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
    again = np.arange(wanted) % tokens
    return Blocks([part[:, again] for part in parts], BLOCK_TOKENS)
