"""Records that lie: a typed error, or a block of wrong values; never a byte outside the block."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.checksum import checksum
from kvstore_kernels.codec.record import HEADER_NBYTES, BadRecord, DType, Form, Header
from tests.kernels.codec.hostile import CASES, NARROW, SEEDS, Hostile, decode_any, hostile
from tests.kernels.codec.memory import pages, place

pytestmark = pytest.mark.usefixtures("isa")

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
any_case = st.sampled_from(list(CASES.values()))


@cases
def test_what_is_right_is_decoded(case: Hostile) -> None:
    for record in case.bases:
        assert case.decode(record) is None
    assert case.decode(case.base, case.fine) is None
    forms = [Header.parse(record).form for record in (*case.bases, case.fine)]
    exact = Form.RAW if case.page.shape.dtype is DType.FP16 else Form.L3
    assert forms == [exact, Form.EP_BASE, Form.RAW, Form.EP_FINE]


def test_the_seeds_of_the_fuzzer_are_right() -> None:
    assert [decode_any(seed) for seed in SEEDS] == [None] * len(SEEDS)


@settings(max_examples=400, deadline=None)
@given(any_case, st.data())
def test_a_changed_record_harms_nothing(case: Hostile, data: st.DataObject) -> None:
    record = bytearray(data.draw(st.sampled_from(case.bases)))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(record) - 1) | st.integers(0, 200))
        record[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(record)))
    case.decode(bytes(record[:cut]) if data.draw(st.booleans()) else bytes(record))


@settings(max_examples=200, deadline=None)
@given(any_case, st.data())
def test_a_changed_fine_part_harms_nothing(case: Hostile, data: st.DataObject) -> None:
    fine = bytearray(case.fine)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(fine) - 1) | st.integers(0, 200))
        fine[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(fine)))
    case.decode(case.base, bytes(fine[:cut]) if data.draw(st.booleans()) else bytes(fine))


@settings(max_examples=100, deadline=None)
@given(any_case, st.binary(max_size=4096))
def test_any_bytes_harm_nothing(case: Hostile, body: bytes) -> None:
    case.decode(body)
    for record in case.bases:
        case.decode(record[:HEADER_NBYTES] + body)
        case.decode(record, body)


@cases
@pytest.mark.parametrize("at", [*range(24), *range(32, HEADER_NBYTES)])
def test_every_byte_of_the_header_counts(case: Hostile, at: int) -> None:
    for record in case.bases:
        assert isinstance(case.decode(changed(record, at)), BadRecord)
    assert isinstance(case.decode(case.base, changed(case.fine, at)), BadRecord)


@cases
def test_every_byte_of_the_pair_counts(case: Hostile) -> None:
    for at in range(24, 32):
        assert isinstance(case.decode(case.base, changed(case.fine, at)), BadRecord)


def changed(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


@cases
def test_counts_that_do_not_add_up_are_found(case: Hostile) -> None:
    header = Header.parse(case.exact)
    if header.form is Form.L3:
        for change in (-1, 1, 64):
            record = bytearray(case.exact)
            table = np.frombuffer(record, "<u4", 2, HEADER_NBYTES)
            table[0] = int(table[0]) + change
            assert isinstance(case.decode(bytes(record)), BadRecord)
    for record in map(bytearray, case.bases):
        record[36:40] = (Header.parse(record).nbytes - 1).to_bytes(4, "little")
        assert isinstance(case.decode(bytes(record)), BadRecord)


@cases
def test_a_record_larger_than_any_is_found(case: Hostile) -> None:
    for record in case.bases:
        longer = record + bytes(len(case.raw) + 1 - len(record))
        assert isinstance(case.decode(longer), BadRecord)


@cases
@pytest.mark.parametrize("nbytes", [0, 10, 64, 65, 500])
def test_a_record_cut_short_is_found(case: Hostile, nbytes: int) -> None:
    for record in case.bases:
        assert isinstance(case.decode(record[:nbytes]), BadRecord)
    assert isinstance(case.decode(case.base, case.fine[:nbytes]), BadRecord)


def test_planes_of_two_encodings_are_never_mixed() -> None:
    one, other = CASES["bf16"], hostile(NARROW, DType.BF16, seed=2)
    assert isinstance(one.decode(one.base, other.fine), BadRecord)
    assert isinstance(one.decode(other.exact, one.fine), BadRecord)


@cases
def test_a_fine_part_is_no_base_and_a_base_no_fine_part(case: Hostile) -> None:
    assert isinstance(case.decode(case.fine), BadRecord)
    assert isinstance(case.decode(case.base, case.base), BadRecord)


def test_a_record_of_another_shape_is_refused() -> None:
    page = pages([[place("V", 1, 16, 80), place("K", 1, 16, 80, first=16 * 80)]], DType.BF16)
    for record in CASES["bf16"].bases:
        (wrong,) = page.coder().decode([1], [memoryview(record)])
        assert isinstance(wrong, BadRecord)
    for one, other in permutations(CASES.values(), 2):
        for record in other.bases:
            assert isinstance(one.decode(record), BadRecord)
        assert isinstance(one.decode(one.base, other.fine), BadRecord)


@cases
def test_the_pair_is_the_checksum_of_the_base_as_stored(case: Hostile) -> None:
    assert Header.parse(case.fine).pair == checksum(case.base)
