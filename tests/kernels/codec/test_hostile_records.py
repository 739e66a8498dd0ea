"""Records that lie: a typed error, or a block of wrong values; never a byte outside the block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.checksum import checksum
from kvstore_kernels.codec.record import HEADER_NBYTES, BadRecord, DType, Header
from tests.kernels.codec.hostile import EXACT, LOSSY, coded, decode
from tests.kernels.codec.memory import pages, place


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_changed_record_harms_nothing(data: st.DataObject) -> None:
    lossy = data.draw(st.booleans())
    record = bytearray((LOSSY if lossy else EXACT).base)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(record) - 1) | st.integers(0, 200))
        record[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(record)))
    decode(bytes(record[:cut]) if data.draw(st.booleans()) else bytes(record))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=4096))
def test_any_bytes_harm_nothing(body: bytes) -> None:
    decode(body)
    decode(bytes(EXACT.base[:HEADER_NBYTES]) + body)
    decode(bytes(EXACT.base), body)


@pytest.mark.parametrize("at", [*range(24), *range(32, HEADER_NBYTES)])
def test_every_byte_of_the_header_counts(at: int) -> None:
    for record in (EXACT.base, LOSSY.base):
        wrong = bytearray(record)
        wrong[at] ^= 1
        assert isinstance(decode(bytes(wrong)), BadRecord)


def test_counts_that_do_not_add_up_are_found() -> None:
    header = Header.parse(EXACT.base)
    for change in (-1, 1, 64):
        record = bytearray(EXACT.base)
        table = np.frombuffer(record, "<u4", 2, HEADER_NBYTES)
        table[0] = int(table[0]) + change
        assert isinstance(decode(bytes(record)), BadRecord)
    short = bytearray(EXACT.base)
    short[36:40] = (header.nbytes - 1).to_bytes(4, "little")
    assert isinstance(decode(bytes(short)), BadRecord)


@pytest.mark.parametrize("nbytes", [0, 10, 64, 65, 500])
def test_a_record_cut_short_is_found(nbytes: int) -> None:
    for record in (EXACT.base, LOSSY.base):
        assert isinstance(decode(bytes(record[:nbytes])), BadRecord)


def test_planes_of_two_encodings_are_never_mixed() -> None:
    assert LOSSY.fine is not None
    _, exact, other = coded(seed=2)
    assert other.fine is not None
    assert decode(bytes(LOSSY.base), bytes(LOSSY.fine)) is None
    assert isinstance(decode(bytes(LOSSY.base), bytes(other.fine)), BadRecord)
    assert isinstance(decode(bytes(exact.base), bytes(LOSSY.fine)), BadRecord)


def test_a_fine_part_is_no_base_and_a_base_no_fine_part() -> None:
    assert LOSSY.fine is not None
    assert isinstance(decode(bytes(LOSSY.fine)), BadRecord)
    assert isinstance(decode(bytes(LOSSY.base), bytes(LOSSY.base)), BadRecord)


def test_a_record_of_another_shape_is_refused() -> None:
    page = pages([[place("V", 1, 16, 80), place("K", 1, 16, 80, first=16 * 80)]], DType.BF16)
    (wrong,) = page.coder().decode([1], [EXACT.base])
    assert isinstance(wrong, BadRecord)


def test_the_pair_is_the_checksum_of_the_base_as_stored() -> None:
    assert LOSSY.fine is not None
    assert Header.parse(LOSSY.fine).pair == checksum(LOSSY.base)
