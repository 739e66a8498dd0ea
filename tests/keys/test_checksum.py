"""The checksum taken behind a copy is the one of the whole."""

import random

import pytest

from kvstore.checksum import LEAF_NBYTES, checksum, copy_and_checksum

SIZES = (0, 1, LEAF_NBYTES - 1, LEAF_NBYTES, 4 * LEAF_NBYTES, 4 * LEAF_NBYTES + 1, 2_000_003)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("of_target", [False, True])
def test_copy_and_checksum_of_any_size(nbytes: int, of_target: bool) -> None:
    source = random.Random(nbytes).randbytes(nbytes)
    target = bytearray(nbytes)
    found = copy_and_checksum(memoryview(source), memoryview(target), of_target=of_target)
    assert target == source
    assert found == checksum(source)


@pytest.mark.parametrize("of_target", [False, True])
def test_the_side_that_is_asked_for_is_summed(of_target: bool) -> None:
    memory = bytearray(range(256)) * 16
    source, target = memoryview(memory)[:3000], memoryview(memory)[1:3001]
    before = checksum(source)
    found = copy_and_checksum(source, target, of_target=of_target)  # they overlap: the copy differs
    assert found == checksum(target if of_target else source)
    assert checksum(source) != before
