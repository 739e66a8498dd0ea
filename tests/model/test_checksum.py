"""Copies that are hashed on their way: the same bytes and checksum as one after the other."""

from __future__ import annotations

import random
import sys

import pytest

from kvstore.model.checksum import LEAF_NBYTES, PIECE_NBYTES, checksum, copy_in, copy_out


@pytest.mark.parametrize("copy", [copy_in, copy_out])
@pytest.mark.parametrize(
    "nbytes", [1, LEAF_NBYTES - 1, LEAF_NBYTES, PIECE_NBYTES, PIECE_NBYTES + 7, 3 * PIECE_NBYTES]
)
def test_a_copy_has_the_checksum_of_its_bytes(copy, nbytes):
    source = random.Random(nbytes).randbytes(nbytes)
    target = bytearray(nbytes)
    assert copy(memoryview(source), memoryview(target)) == checksum(source)
    assert target == source


def test_what_is_hashed_is_what_was_meant_on_the_way_in_and_what_arrived_on_the_way_out(
    monkeypatch,
):
    def spoils(source, target):
        target[:] = source
        target[5] ^= 1

    module = sys.modules[copy_in.__module__]  # the package has a function of that name
    monkeypatch.setattr(module, "copy_bytes", spoils)
    source, target = bytes(PIECE_NBYTES), bytearray(PIECE_NBYTES)
    assert copy_in(memoryview(source), memoryview(target)) == checksum(source)
    assert copy_out(memoryview(source), memoryview(target)) == checksum(target) != checksum(source)
