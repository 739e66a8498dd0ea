"""Records that lie are decoded here, between guards: nothing outside the block may change."""

from __future__ import annotations

from kvstore.model.checksum import checksum
from kvstore_kernels.codec.coder import Encoded
from kvstore_kernels.codec.copies import CodedCopies, Fine, Scratch
from kvstore_kernels.codec.record import HEADER_NBYTES, BadRecord, DType
from tests.kernels.codec.memory import Pages, made_up, pages, place

GUARD = 0xA5


def coded(seed: int = 1) -> tuple[Pages, Encoded, Encoded]:
    """Return memory with records of its block 1: exact, and lossy. Blocks 0 and 2 are guards."""
    keys, values = place("K", 1, 16, 80), place("V", 1, 16, 80, first=16 * 80)
    page = pages([[keys, values]], DType.BF16)
    page.fill(1, made_up(page.shape, seed))
    exact, lossy = page.coder().encode_lossy([1, 1], [True, False], page.room(2))
    for layer in page.memory:
        layer[[0, 2]] = GUARD
    return page, exact, lossy


PAGE, EXACT, LOSSY = coded()


def decode(base: bytes, fine: bytes | None = None) -> BadRecord | None:
    """Decode private copies, and from a slot: both have to find the same."""
    coder, parts = PAGE.coder(), None if fine is None else Fine(memoryview(fine), checksum(fine))
    (wrong,) = coder.decode([1], [memoryview(base)], [None if fine is None else memoryview(fine)])
    _check_guards()
    (loaded,) = CodedCopies(coder, checksum, Scratch()).refine([1], [memoryview(base)], [parts])
    _check_guards()
    if fine is None or wrong is None:
        assert (loaded.base is None) == (wrong is not None), (loaded, wrong)
    assert loaded.base in (None, checksum(base))
    assert loaded.refined is (None if fine is None else wrong is None)
    return wrong


def _check_guards() -> None:
    for layer in PAGE.memory:
        assert (layer[[0, 2]] == GUARD).all(), "written outside the block"


SEEDS = [
    bytes([form]) + each
    for form, each in enumerate(
        (
            bytes(EXACT.base),
            bytes(LOSSY.base) + bytes(LOSSY.fine or b""),
            bytes(EXACT.base[HEADER_NBYTES:]),
        )
    )
]


def decode_any(data: bytes) -> BadRecord | None:
    """Decode what a fuzzer makes up. The first byte says how the rest is cut: a record, a record
    with a fine part, or what stands behind an honest header."""
    form, data = (data[0], data[1:]) if data else (0, b"")
    if form == 1:
        split = len(LOSSY.base)
        return decode(data[:split], data[split:])
    if form == 2:
        header = bytearray(EXACT.base[:HEADER_NBYTES])
        header[36:40] = (HEADER_NBYTES + len(data)).to_bytes(4, "little")
        return decode(bytes(header) + data)
    return decode(data)
