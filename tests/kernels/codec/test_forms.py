"""One format in numpy and in C++, for every instruction set, and exact where it says so."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvstore_kernels.codec import reference
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES
from kvstore_kernels.codec.places import Place, Shape, Unplaced, tile_tokens
from kvstore_kernels.codec.record import HEADER_NBYTES, DType, Form, Header
from tests.kernels.codec.memory import Pages, made_up, pages, place, wide

GOLDEN = {
    (16, 64): ("386aad87aa620d2a", "4546a5551a1ce860", "b734a71b210e1bc6", "21fa1c746b61f8d6"),
    (16, 128): ("cb9a8e33babc3e62", "75e61d7ef82c5ece", "6b51c0323b98b38e", "14240b577be911e6"),
    (16, 256): ("aa3149f609c624d2", "7a1c683890f2b0d2", "d56d9252a1c15859", "50946e3db20458d8"),
    (8, 128): ("386aad87aa620d2a", "79cc51e565f2dea0", "a30d3cdc324e2d7c", "779d9d207319b43b"),
}
"""XXH3-64 of the pattern; of L3's group table, tile and escapes; of EP's keys; of its values."""


PAST_CACHES_NBYTES = 512 << 10
"""As PAST_CACHES_DECODED of library.cpp: of the blocks of one call."""


pytestmark = pytest.mark.usefixtures("isa")


def pattern(tokens: int, channels: int) -> np.ndarray:
    """Sums of uniforms as bfloat16, with large channels, a zero and a denormal."""
    count = tokens * channels
    u = (reference.splitmix64(4 * count, 1) >> np.uint64(40)).astype(np.float32) * np.float32(
        2**-24
    )
    x = u.reshape(4, tokens, channels).sum(0, dtype=np.float32) - np.float32(2)
    large = np.arange(channels) % 16 == 3
    x = x * (1 + large * np.float32(30)).astype(np.float32)
    bits = reference.of_float(np.ascontiguousarray(x, np.float32), DType.BF16).copy()
    bits[0, 0], bits[-1, -1] = 0, 1
    return bits


def digest(*parts: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(b''.join(parts)):016x}"


def one(kind: str, tokens: int, channels: int) -> Pages:
    return pages([[place(kind, 1, tokens, channels)]], DType.BF16)


@pytest.mark.parametrize(("tokens", "channels"), GOLDEN)
def test_the_bytes_are_the_golden_ones(tokens: int, channels: int) -> None:
    x, (values, l3, keys, rotated) = pattern(tokens, channels), GOLDEN[tokens, channels]
    assert digest(x.tobytes()) == values
    page = one("K", tokens, channels)
    page.fill(0, [x])
    (encoded,) = page.coder().encode_exact([0], page.room(1))
    record = bytes(encoded.base)
    header, groups = Header.parse(record), -(-channels // 64)
    table = record[HEADER_NBYTES : HEADER_NBYTES + 4 * groups]
    assert digest(table, record[page.shape.l3_body_at : header.nbytes]) == l3
    for kind, expected in (("K", keys), ("V", rotated)):
        page = one(kind, tokens, channels)
        page.fill(0, [x])
        (encoded,) = page.coder().encode_lossy([0], [False], page.room(1))
        assert encoded.fine is not None
        stripes, planes = (channels, 5) if kind == "K" else (tokens, 4)
        nbytes = 3 * stripes + planes * tokens * channels // 8  # zeros follow
        base = bytes(encoded.base)[HEADER_NBYTES : HEADER_NBYTES + nbytes]
        assert digest(base, bytes(encoded.fine)[HEADER_NBYTES:]) == expected


def both_ways(page: Pages) -> None:
    """Encode block 1 and decode it into block 2, natively and by the reference."""
    shape, coder, room = page.shape, page.coder(), page.room(1)
    tiles = page.tiles(1)
    if shape.dtype is not DType.FP16:
        slow = reference.l3_encode(shape, tiles)
        (encoded,) = coder.encode_exact([1], room)
        if len(slow) < shape.record_nbytes:
            assert bytes(encoded.base)[: len(slow)] == slow
            assert not any(bytes(encoded.base)[len(slow) :])
        assert coder.decode([2], [encoded.base]) == [None]
        assert page.memory[0][2].tobytes() == page.memory[0][1].tobytes()
        for was, now in zip(tiles, reference.l3_decode(shape, slow), strict=True):
            assert np.array_equal(was, now)
    made = reference.ep_encode(shape, tiles, BASE_PLANES, FINE_PLANES)
    (encoded,) = coder.encode_lossy([1], [False], room)
    if made is None:
        assert encoded.fine is None
        assert Header.parse(encoded.base).form in (Form.L3, Form.RAW)
        return
    assert encoded.fine is not None
    assert bytes(encoded.base) == made[0]
    assert bytes(encoded.fine)[HEADER_NBYTES:] == made[1][HEADER_NBYTES:]
    for fine, slow_fine in ((None, None), (encoded.fine, made[1])):
        assert coder.decode([2], [encoded.base], [fine]) == [None]
        slow_tiles = reference.ep_decode(shape, made[0], slow_fine)
        for now, expected in zip(page.tiles(2), slow_tiles, strict=True):
            assert np.array_equal(now, expected)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32], ids=lambda d: d.name)
@pytest.mark.parametrize("channels", [64, 80, 96, 128, 256, 576])
@pytest.mark.parametrize("tokens", [8, 16, 24, 64, 128, 256])
def test_c_computes_what_numpy_computes(tokens: int, channels: int, dtype: DType) -> None:
    for order in ("htc", "thc", "hct", "p", "a"):
        keys = place("K", 2, tokens, channels, order=order)
        values = place("V", 2, tokens, channels, first=2 * tokens * channels, order=order)
        page = pages([[keys, values]], dtype)
        page.fill(1, made_up(page.shape, tokens * channels))
        both_ways(page)


@pytest.mark.parametrize("begin", [0, 2, 32])
@pytest.mark.parametrize("order", ["htc", "thc", "hct", "p", "a"])
@pytest.mark.parametrize(
    ("tokens", "channels"), [(16, 64), (24, 64), (32, 64), (16, 80), (32, 96), (64, 128)]
)
def test_many_blocks_go_past_the_caches(tokens, channels, order, begin) -> None:
    """They are written line by line where they begin at lines, and nothing beside them is."""
    keys = place("K", 4, tokens, channels, order=order)
    values = place("V", 4, tokens, channels, first=4 * tokens * channels, order=order)
    shape = Shape([[keys, values]] * 2, DType.BF16)
    blocks = -(-PAST_CACHES_NBYTES // shape.raw_nbytes)
    page = pages([[keys, values]] * 2, DType.BF16, 2 * blocks + 1)
    page.memory = [moved(each, begin) for each in page.memory]
    for block in range(blocks):
        page.fill(block, made_up(shape, block))
    before = [each.copy() for each in page.memory]
    coder, targets = page.coder(), list(range(blocks, 2 * blocks))
    encoded = coder.encode_exact(range(blocks), page.room(blocks))
    for memory in page.memory:
        memory[blocks:] = 0xAA
    assert coder.decode(targets, [each.base for each in encoded]) == [None] * blocks
    for memory, was in zip(page.memory, before, strict=True):
        assert np.array_equal(memory[blocks : 2 * blocks], was[:blocks])
        assert np.array_equal(memory[:blocks], was[:blocks])
        assert (memory[2 * blocks] == 0xAA).all()


def moved(memory: np.ndarray, begin: int) -> np.ndarray:
    """Return memory of this shape that begins so many bytes behind the begin of a line."""
    room = np.zeros(memory.size + 128, np.uint8)
    first = -room.ctypes.data % 64 + begin
    return room[first : first + memory.size].reshape(memory.shape)


SPECIAL = {
    "zeros": lambda n: np.zeros(n, np.uint16),
    "negative zeros": lambda n: np.full(n, 0x8000, np.uint16),
    "denormals": lambda n: np.arange(n, dtype=np.uint16) & 0x807F,
    "infinities": lambda n: np.where(np.arange(n) % 7, 0x3F80, 0xFF80).astype(np.uint16),
    "nan": lambda n: np.where(np.arange(n) % 5, 0x3F80, 0x7FC1).astype(np.uint16),
    "huge": lambda n: np.where(np.arange(n) % 3, 0x3F80, 0x4780).astype(np.uint16),
    "any bits": lambda n: np.random.default_rng(7).integers(0, 1 << 16, n).astype(np.uint16),
    "constant": lambda n: np.full(n, 0x3FC0, np.uint16),
    "tiny": lambda n: np.full(n, 0x8E00, np.uint16),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_whatever_the_bits_they_come_back(name: str) -> None:
    page = pages([[place("K", 2, 16, 96), place("V", 2, 16, 96, first=2 * 16 * 96)]], DType.BF16)
    page.memory[0][1].view(np.uint16)[:] = SPECIAL[name](page.memory[0][1].size // 2)
    both_ways(page)


def test_what_l3_does_not_make_smaller_is_stored_raw() -> None:
    page = one("K", 16, 128)
    page.memory[0][1][:] = np.random.default_rng(3).integers(0, 256, page.memory[0][1].size)
    (encoded,) = page.coder().encode_exact([1], page.room(1))
    assert Header.parse(encoded.base).form is Form.RAW
    assert encoded.uncoded
    assert len(encoded.base) == page.shape.record_nbytes
    assert page.coder().decode([2], [encoded.base]) == [None]
    assert page.memory[0][2].tobytes() == page.memory[0][1].tobytes()


def test_float16_is_stored_raw_where_exact() -> None:
    page = pages([[place("K", 1, 16, 64)]], DType.FP16)
    page.fill(1, made_up(page.shape, 5))
    (encoded,) = page.coder().encode_exact([1], page.room(1))
    assert Header.parse(encoded.base).form is Form.RAW


def test_an_exact_block_of_a_lossy_batch_is_exact() -> None:
    page = one("V", 16, 128)
    for block in range(3):
        page.fill(block, made_up(page.shape, block))
    encoded = page.coder().encode_lossy([0, 1], [True, False], page.room(2))
    assert [each.fine is None for each in encoded] == [True, False]
    assert Header.parse(encoded[0].base).form is Form.L3
    assert [each.uncoded for each in encoded] == [False, False]
    assert page.coder().decode([2], [encoded[0].base]) == [None]
    assert page.memory[0][2].tobytes() == page.memory[0][0].tobytes()


def test_a_batch_is_its_blocks() -> None:
    page = pages([[place("K", 1, 16, 64)], [place("V", 1, 16, 64)]], DType.BF16, blocks=9)
    for block in range(9):
        page.fill(block, made_up(page.shape, block))
    before = [layer.copy() for layer in page.memory]
    coder, room = page.coder(), page.room(9)
    records = [bytes(each.base) for each in coder.encode_exact([3, 1, 8, 0, 5], room)]
    for layer in page.memory:
        layer[:] = 0
    wrong = coder.decode([3, 1, 8, 0, 5], [memoryview(record) for record in records])
    assert wrong == [None] * 5
    for layer, was in zip(page.memory, before, strict=True):
        assert np.array_equal(layer[[3, 1, 8, 0, 5]], was[[3, 1, 8, 0, 5]])
        assert not layer[[2, 4, 6, 7]].any()


@pytest.mark.parametrize(
    ("kind", "tokens", "channels", "dtype"),
    [
        ("K", 12, 64, DType.BF16),
        ("K", 16, 72, DType.BF16),
        ("K", 16, 2048, DType.BF16),
        ("Q", 16, 64, DType.BF16),
        ("K", 16, 64, DType.FP8),
    ],
)
def test_what_cannot_be_coded_is_told(kind: str, tokens: int, channels: int, dtype: DType) -> None:
    with pytest.raises(Unplaced):
        Shape([[place(kind, 1, tokens, channels)]], dtype)


def test_tiles_have_at_most_64_tokens() -> None:
    assert [tile_tokens(n) for n in (8, 64, 72, 128, 144, 200, 256)] == [8, 64, 24, 64, 48, 40, 64]


def test_other_places_are_another_shape() -> None:
    def shape(*places: Place) -> Shape:
        return Shape([places], DType.BF16)

    keys = place("K", 2, 16, 64)
    shapes = [
        shape(keys),
        shape(place("V", 2, 16, 64)),
        shape(place("K", 2, 16, 64, order="hct")),
        shape(place("K", 2, 16, 64, order="p")),
        shape(place("K", 2, 16, 64, first=1)),
        shape(keys, place("V", 2, 16, 64, first=2048)),
        Shape([[keys]], DType.FP16),
    ]
    assert len({each.digest for each in shapes}) == len(shapes)
    assert shape(keys).digest == shape(place("K", 2, 16, 64)).digest


def test_a_stripe_of_negative_zeros_stays_near_zero_in_the_base_part() -> None:
    """Its width is a negative zero, whose bits are no small step."""
    for kind in ("K", "V"):
        page = one(kind, 16, 64)
        page.memory[0][1].view(np.uint16)[:] = 0x8000
        (encoded,) = page.coder().encode_lossy([1], [False], page.room(1))
        assert page.coder().decode([2], [encoded.base]) == [None]
        values = reference.to_float(page.memory[0][2].view(np.uint16), DType.BF16)
        assert np.abs(values).max() < 1e-5


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32], ids=lambda d: d.name)
@pytest.mark.parametrize("kind", ["K", "V"])
def test_a_stripe_that_is_too_wide_is_kept_whole(kind: str, dtype: DType) -> None:
    """8 bits tell no step above 240, and a half no rotated value below -65504."""
    lossy = set()
    for size in (100.0, 2000.0, 5000.0, 8000.0, 30000.0, 31000.0, 40000.0, 60000.0):
        page = wide(kind, size, dtype)
        both_ways(page)
        (encoded,) = page.coder().encode_lossy([1], [False], page.room(1))
        assert page.coder().decode([2], [encoded.base], [encoded.fine]) == [None]
        was, now = (reference.to_float(page.tiles(block)[0], dtype) for block in (1, 2))
        # Rotated back, the errors of a row that lies along the rotation come together.
        assert np.abs(was - now).max() <= np.ptp(was) / (100 if kind == "K" else 6)
        lossy.add((size, encoded.fine is not None))
    assert {(100.0, True), (2000.0, True), (60000.0, False)} <= lossy
