"""Latents with rotary parts behind them, a row for each token, as engines keep them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvstore_kernels.codec.places import Axis, Place
from kvstore_kernels.codec.record import DType
from tests.kernels.codec.memory import Pages, made_up, pages
from tests.kernels.codec.test_forms import SPECIAL, both_ways


def in_rows(
    tokens: int, dtype: DType = DType.BF16, layers: int = 2, sizes: tuple[int, int] = (512, 64)
) -> Pages:
    """Return pages of layers whose rows are a latent, and a rotary part behind it."""
    row = sum(sizes)
    head, by_token = Axis(1, 0), Axis(tokens, row)
    places = [
        Place("latent", head, by_token, Axis(sizes[0], 1)),
        Place("rope", head, by_token, Axis(sizes[1], 1), sizes[0]),
    ]
    return pages([places] * layers, dtype)


@pytest.fixture
def same_as_host(codec_library: ctypes.CDLL) -> Callable[[Pages], None]:
    """Imported here, because it needs torch."""
    from tests.kernels.codec.test_device_coder import same_as_host

    return partial(same_as_host, codec_library=codec_library)


DTYPES = [DType.BF16, DType.FP16, DType.FP32]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_c_computes_what_numpy_computes(tokens: int, dtype: DType) -> None:
    page = in_rows(tokens, dtype)
    page.fill(1, made_up(page.shape, tokens))
    both_ways(page)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", SPECIAL)
def test_whatever_the_bits_they_come_back(name: str) -> None:
    page = in_rows(32)
    for layer in page.memory:
        layer[1].view(np.uint16)[:] = SPECIAL[name](layer[1].size // 2)
    both_ways(page)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_a_device_computes_what_the_host_computes(
    tokens: int, dtype: DType, same_as_host: Callable[[Pages], None]
) -> None:
    page = in_rows(tokens, dtype)
    page.fill(1, made_up(page.shape, tokens))
    same_as_host(page)


@pytest.mark.parametrize("sizes", [(256, 64), (384, 32), (1024, 128)], ids=str)
def test_other_widths(sizes: tuple[int, int], same_as_host: Callable[[Pages], None]) -> None:
    page = in_rows(32, sizes=sizes)
    page.fill(1, made_up(page.shape, sum(sizes)))
    same_as_host(page)


@pytest.mark.parametrize("name", SPECIAL)
def test_whatever_the_bits_a_device_computes_the_same(
    name: str, same_as_host: Callable[[Pages], None]
) -> None:
    page = in_rows(16, layers=1)
    page.memory[0][1].view(np.uint16)[:] = SPECIAL[name](page.memory[0][1].size // 2)
    same_as_host(page)
