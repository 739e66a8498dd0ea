"""A snapshot that is stored: whole, of that prefix, or refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvstore import CorruptBlock
from kvstore_llamacpp.loading import open_snapshot, snapshot_nbytes, write_snapshot

STATE = np.frombuffer(struct.pack("=Ii", 0xAF143CD8, 0) + bytes(range(64)), np.uint8)


def record(tokens: int = 64) -> np.ndarray:
    made = np.empty(snapshot_nbytes(STATE), np.uint8)
    write_snapshot(STATE, tokens, made)
    return made


def test_it_comes_back() -> None:
    assert (open_snapshot(record(), 64) == STATE).all()


@pytest.mark.parametrize("at", [0, 8, 16, 24])
def test_a_damaged_head_is_refused(at: int) -> None:
    wrong = record()
    wrong[at] ^= 1
    with pytest.raises(CorruptBlock):
        open_snapshot(wrong, 64)


@pytest.mark.parametrize("nbytes", [0, 8, 24, 31, 60])
def test_a_truncated_one_is_refused(nbytes: int) -> None:
    with pytest.raises(CorruptBlock):
        open_snapshot(record()[:nbytes], 64)


def test_one_of_another_prefix_is_refused() -> None:
    with pytest.raises(CorruptBlock):
        open_snapshot(record(tokens=96), 64)
