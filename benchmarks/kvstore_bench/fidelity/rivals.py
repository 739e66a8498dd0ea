"""Other ways to store KV in fewer bits, written in numpy: what they lose, not how fast they are.

Each takes KV as float32 (heads, tokens, channels), and returns what a reader would get back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
FP8_MAX = 448.0
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_CHANNELS = 16
LEVELS = 16


@dataclass(frozen=True, slots=True)
class Rival:
    """bits: of a value, with its share of scales, for so many channels."""

    bits: Callable[[int], float]
    lose: Callable[[Floats], Floats]


def fp8(x: Floats) -> Floats:
    """Cast to float8 e4m3, with one scale for each layer's keys or values, from their maximum."""
    scale = np.float32(max(float(np.abs(x).max()), 1e-30) / FP8_MAX)
    return _e4m3(x / scale) * scale


def int8(x: Floats) -> Floats:
    """8 bits, with a float16 scale for each token of each head, from its maximum."""
    scale = _half(np.abs(x).max(-1, keepdims=True) / np.float32(127))
    codes: Floats = np.clip(np.rint(x / scale), -127, 127)
    return codes * scale


def nvfp4(x: Floats) -> Floats:
    """NVIDIA's NVFP4: e2m1, an e4m3 scale for 16 channels, a float32 scale for all."""
    whole = np.float32(max(float(np.abs(x).max()), 1e-30) / (FP8_MAX * FP4[-1]))
    heads, tokens, channels = x.shape
    groups = x.reshape(heads, tokens, channels // FP4_CHANNELS, FP4_CHANNELS)
    scale = _e4m3(np.abs(groups).max(-1, keepdims=True) / FP4[-1] / whole) * whole
    scaled = groups / np.where(scale > 0, scale, np.float32(1))
    nearest = np.searchsorted((FP4[1:] + FP4[:-1]) / 2, np.abs(scaled))
    found: Floats = (np.sign(scaled) * FP4[nearest] * scale).reshape(x.shape)
    return found.astype(np.float32)


def turboquant4(x: Floats) -> Floats:
    """TurboQuant at 4 bits (Zandieh et al., 2025): a random rotation of each vector, then the best
    scalar quantizer of what its channels are distributed like; a float16 norm for each vector."""
    channels = x.shape[-1]
    turn = _rotation(channels)
    norm = _half(np.linalg.norm(x, axis=-1, keepdims=True))
    unit = x @ turn / norm * np.float32(channels) ** np.float32(0.5)
    levels = gaussian_levels()
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)
    found: Floats = (levels[codes] @ turn.T) * norm / np.float32(channels) ** np.float32(0.5)
    return found.astype(np.float32)


RIVALS = {
    "fp8": Rival(lambda _: 8.0, fp8),
    "int8_token": Rival(lambda channels: 8 + 16 / channels, int8),
    "nvfp4": Rival(lambda _: 4 + 8 / FP4_CHANNELS, nvfp4),
    "turboquant4": Rival(lambda channels: 4 + 16 / channels, turboquant4),
}


def _e4m3(x: Floats) -> Floats:
    """Round to float8 e4m3, to nearest even; what is too large becomes the largest."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent, -5) - 4).astype(np.float32)  # of the 3 bits of mantissa
    found: Floats = np.clip(np.rint(x / step) * step, -FP8_MAX, FP8_MAX)
    return found.astype(np.float32)


def _half(x: Floats) -> Floats:
    rounded: Floats = np.maximum(x, np.float32(6e-8)).astype(np.float16).astype(np.float32)
    return rounded


@cache
def _rotation(channels: int) -> Floats:
    """Return a random rotation (channels, channels): the Q of a Gaussian matrix."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(channels, channels)))
    return np.asarray(turn, np.float32)


@cache
def gaussian_levels() -> Floats:
    """Return the 16 levels of least squared error for a standard normal value (Lloyd, Max)."""
    x = np.linspace(-6, 6, 60_001)
    weight = np.exp(-(x**2) / 2)
    levels = np.linspace(-3, 3, LEVELS)
    for _ in range(500):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
        sums = np.bincount(nearest, weight * x, LEVELS)
        levels = sums / np.bincount(nearest, weight, LEVELS)
    return np.asarray(levels, np.float32)
