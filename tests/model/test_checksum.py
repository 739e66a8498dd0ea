"""Copies that are hashed on their way: the same bytes and checksum as one after the other."""

from __future__ import annotations

import random
import sys

import pytest
import xxhash

from kvstore.model.checksum import (
    LEAF_NBYTES,
    PIECE_NBYTES,
    checksum,
    copies_in,
    copies_out,
    copy_in,
    copy_out,
)
from kvstore_kernels import native

MODULE = sys.modules[copy_in.__module__]  # the package has a function of that name


@pytest.fixture(params=["native", "python"])
def by(request, monkeypatch):
    """The native library, where there is one; and what stands in for it elsewhere."""
    if request.param == "python":
        monkeypatch.setattr(MODULE, "_natively", lambda nbytes: False)
    elif native.reason():
        pytest.skip(native.reason())
    return request.param


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("copy", [copy_in, copy_out])
@pytest.mark.parametrize(
    "nbytes", [1, LEAF_NBYTES - 1, LEAF_NBYTES, PIECE_NBYTES, PIECE_NBYTES + 7, 3 * PIECE_NBYTES]
)
def test_a_copy_has_the_checksum_of_its_bytes(copy, nbytes):
    source = random.Random(nbytes).randbytes(nbytes)
    target = bytearray(nbytes)
    assert copy(memoryview(source), memoryview(target)) == checksum(source) == plain(source)
    assert target == source


@pytest.mark.usefixtures("by")
def test_a_batch_of_copies_is_as_one_by_one():
    sources = [random.Random(size).randbytes(size) for size in (1, 70_000, 0, 200_000)]
    for copies in (copies_in, copies_out):
        targets = [bytearray(len(source)) for source in sources]
        found = copies([memoryview(each) for each in sources], [memoryview(t) for t in targets])
        assert found == [plain(source) for source in sources]
        assert targets == sources


def plain(data: bytes) -> int:
    """The checksum by its definition."""
    leaves = [data[at : at + LEAF_NBYTES] for at in range(0, len(data), LEAF_NBYTES)]
    digests = [xxhash.xxh3_64_intdigest(leaf).to_bytes(8, "little") for leaf in leaves]
    return xxhash.xxh3_64_intdigest(b"".join(digests))


def test_what_is_hashed_is_what_was_meant_on_the_way_in_and_what_arrived_on_the_way_out(
    monkeypatch,
):
    def spoils(source, target):
        target[:] = source
        target[5] ^= 1

    monkeypatch.setattr(MODULE, "_natively", lambda nbytes: False)
    monkeypatch.setattr(MODULE, "copy_bytes", spoils)
    source, target = bytes(PIECE_NBYTES), bytearray(PIECE_NBYTES)
    assert copy_in(memoryview(source), memoryview(target)) == checksum(source)
    assert copy_out(memoryview(source), memoryview(target)) == checksum(target) != checksum(source)
