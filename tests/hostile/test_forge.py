from __future__ import annotations

import random

import pytest

from kvstore import checksum
from tests.hostile.forge import LEAF_NBYTES, forged


@pytest.mark.parametrize("nbytes", [LEAF_NBYTES, 3 * LEAF_NBYTES, 2 * LEAF_NBYTES + 777])
def test_a_forgery_has_the_checksum_of_what_it_replaces(nbytes: int) -> None:
    record = random.Random(nbytes).randbytes(nbytes)
    other = forged(record, b"POISON! " * 100)
    assert other != record
    assert other.count(b"POISON! ") >= 100 * (nbytes // LEAF_NBYTES)
    assert checksum(memoryview(other)) == checksum(memoryview(record))


def test_a_record_without_a_whole_leaf_is_refused() -> None:
    with pytest.raises(ValueError, match="leaf"):
        forged(bytes(1000), b"x")
