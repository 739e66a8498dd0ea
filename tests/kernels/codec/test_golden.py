"""Whole records are those that were stored before: header, shape, body, and what they are rounded
up to. A change here is another format, and wants another name of it in the namespace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from kvstore_kernels.codec import reference
from kvstore_kernels.codec.places import Axis, Place
from kvstore_kernels.codec.record import DType
from kvstore_kernels.codec.reference import Bits
from tests.kernels.codec.memory import Pages, both, pages, place

pytestmark = pytest.mark.usefixtures("isa")


class Golden(NamedTuple):
    """What a block's records are: `bytes XXH3-64` of the exact one, of a base and a fine part.
    text: what the digest in every header is of."""

    layers: list[list[Place]]
    dtype: DType
    text: str
    exact: str
    base: str
    fine: str


MLA = [place("latent", 1, 16, 512), place("rope", 1, 16, 64, first=16 * 512)]
MLA_ROWS = [
    Place("latent", Axis(1, 0), Axis(32, 576), Axis(512, 1)),
    Place("rope", Axis(1, 0), Axis(32, 576), Axis(64, 1), 512),
]
GOLDEN = {
    "bf16": Golden(
        [both(2, 16, 128)] * 2,
        DType.BF16,
        '["BF16",[[["K",2,16,128,[[2048],[128],[1]],0],["V",2,16,128,[[2048],[128],[1]],4'
        '096]],[["K",2,16,128,[[2048],[128],[1]],0],["V",2,16,128,[[2048],[128],[1]],4096'
        "]]]]",
        "23456 a8f912caf50dce11",
        "11008 73cf904add5032c2",
        "7232 afa5fd7260a29b12",
    ),
    "fp16": Golden(
        [both(1, 16, 64)],
        DType.FP16,
        '["FP16",[[["K",1,16,64,[[1024],[64],[1]],0],["V",1,16,64,[[1024],[64],[1]],1024]]]]',
        "4160 ef3b910154e8daef",
        "1456 b917d4610e659280",
        "960 e808093d81161725",
    ),
    "fp32": Golden(
        [both(1, 16, 64)],
        DType.FP32,
        '["FP32",[[["K",1,16,64,[[1024],[64],[1]],0],["V",1,16,64,[[1024],[64],[1]],1024]]]]',
        "7104 0701485abccf7f8d",
        "1456 67ba6331ec92ffea",
        "960 3e35001e8feffa30",
    ),
    "more than 64 tokens": Golden(
        [both(1, 144, 64)],
        DType.BF16,
        '["BF16",[[["K",1,144,64,[[9216],[64],[1]],0],["V",1,144,64,[[9216],[64],[1]],9216]]]]',
        "26016 e2ad00329ec38765",
        "11440 3b12f0a44cd1080b",
        "8128 39d9ff1552337108",
    ),
    "no power of two": Golden(
        [both(2, 16, 80, "thc"), both(1, 16, 96)],
        DType.BF16,
        '["BF16",[[["K",2,16,80,[[80],[160],[1]],0],["V",2,16,80,[[80],[160],[1]],2560]],'
        '[["K",1,16,96,[[1536],[96],[1]],0],["V",1,16,96,[[1536],[96],[1]],1536]]]]',
        "11824 c2f98aefffb6fd5c",
        "5584 cdcee1694b4d1e10",
        "3648 92bedd4f01f8e9f2",
    ),
    "fp32 of no power of two": Golden(
        [both(1, 24, 80)],
        DType.FP32,
        '["FP32",[[["K",1,24,80,[[1920],[80],[1]],0],["V",1,24,80,[[1920],[80],[1]],1920]]]]',
        "13216 7e5fd26363ae3f67",
        "2544 6d06e954006bf5ca",
        "1744 a2035ea4ec4e89d6",
    ),
    "pairs": Golden(
        [both(2, 16, 64, "p")],
        DType.BF16,
        '["BF16",[[["K",2,16,64,[[1024],[2],[2,1,32]],0],["V",2,16,64,[[1024],[2],[2,1,32'
        "]],2048]]]]",
        "5920 79871cf9ad8196f9",
        "2848 7a2437141a595a9f",
        "1856 a074316c09dfd455",
    ),
    "amx": Golden(
        [both(1, 32, 64, "a")],
        DType.BF16,
        '["BF16",[[["K",1,32,64,[[2048],[16,2,1024],[2,1,32]],0],["V",1,32,64,[[2048],[2,'
        "1,32],[16,2,512]],2048]]]]",
        "5872 d78d26266fd3a9d3",
        "2656 21aefe800ba8d210",
        "1856 c3677f24dd288a29",
    ),
    "mla": Golden(
        [MLA],
        DType.BF16,
        '["BF16",[[["latent",1,16,512,[[8192],[512],[1]],0],["rope",1,16,64,[[1024],[64],'
        "[1]],8192]]]]",
        "13248 057106ac14bd6e8b",
        "5040 24ded4a593ee3b77",
        "4544 37c23459a51d5f85",
    ),
    "mla in rows": Golden(
        [MLA_ROWS] * 2,
        DType.BF16,
        '["BF16",[[["latent",1,32,512,[[0],[576],[1]],0],["rope",1,32,64,[[0],[576],[1]],'
        '512]],[["latent",1,32,512,[[0],[576],[1]],0],["rope",1,32,64,[[0],[576],[1]],512'
        "]]]]",
        "52128 b2487c61084514ef",
        "19584 75ec335194409a04",
        "17984 07ab50099b164465",
    ),
}


def tile(tokens: int, channels: int, seed: int, dtype: DType) -> Bits:
    """Sums of uniforms, with large channels and a zero: the same on every machine."""
    count = 4 * tokens * channels
    u = (reference.splitmix64(count, seed) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    x = u.reshape(4, tokens, channels).sum(0, dtype=np.float32) - np.float32(2)
    large = np.arange(channels) % 16 == 3
    x = x * (1 + large * np.float32(30)).astype(np.float32)
    x[0, 0] = 0
    return reference.of_float(np.ascontiguousarray(x, np.float32), dtype)


def filled(golden: Golden) -> Pages:
    page = pages(golden.layers, golden.dtype)
    tiles = [
        tile(int(each["tokens"]), int(each["channels"]), seed, golden.dtype)
        for seed, each in enumerate(page.shape.tiles, 1)
    ]
    page.fill(1, tiles)
    return page


def digest(record: memoryview) -> str:
    return f"{len(record)} {xxhash.xxh3_64_intdigest(record):016x}"


def records(page: Pages) -> tuple[str, str, str]:
    exact, lossy = page.coder().encode_lossy([1, 1], [True, False], page.room(2))
    assert lossy.fine is not None
    return digest(exact.base), digest(lossy.base), digest(lossy.fine)


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_whole_records_are_the_golden_ones(golden: Golden) -> None:
    page = filled(golden)
    assert page.shape.text == golden.text
    assert page.shape.digest == xxhash.xxh3_64_intdigest(golden.text.encode())
    assert records(page) == (golden.exact, golden.base, golden.fine)
