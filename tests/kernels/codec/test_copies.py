"""Coded records through slots that others may write to: copied, summed up, then decoded."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.model.checksum import checksum
from kvstore_kernels import native
from kvstore_kernels.codec.copies import CodedCopies, Decoded, Fine, Scratch
from kvstore_kernels.codec.record import DType, Form, Header
from tests.kernels.codec.memory import Pages, made_up, pages, place

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=native.reason())
BLOCKS = 5


def filled() -> Pages:
    made = pages([[place("K", 2, 16, 64)], [place("V", 2, 16, 64)]], DType.BF16, blocks=2 * BLOCKS)
    for block in range(BLOCKS):
        made.fill(block, made_up(made.shape, block))
    return made


def copies(of: Pages, *, lossy: bool = True) -> CodedCopies:
    return CodedCopies(of.coder(), checksum, Scratch(), lossy=lossy)


def stored(of: Pages) -> list[tuple[bytes, Fine | None]]:
    """Blocks as a worker stores them: the first one exact."""
    exact = [block == 0 for block in range(BLOCKS)]
    return [
        (
            bytes(each.base),
            None
            if each.fine is None
            else Fine(memoryview(bytes(each.fine)), checksum(bytes(each.fine))),
        )
        for each in copies(of).encode(range(BLOCKS), exact)
    ]


def error(of: Pages, block: int) -> float:
    """How far a block lies from the one that it was decoded from."""
    was, now = (
        np.concatenate([tile.ravel() for tile in of.tiles(each)]).astype(np.uint32) << 16
        for each in (block, BLOCKS + block)
    )
    difference = was.view(np.float32) - now.view(np.float32)
    return float(np.sqrt(np.mean(difference**2)))


def test_a_fine_part_makes_a_block_finer_and_the_first_one_is_exact() -> None:
    page = filled()
    records = stored(page)
    assert [fine is None for _, fine in records] == [True, False, False, False, False]
    bases, fines = [memoryview(base) for base, _ in records], [fine for _, fine in records]
    targets = range(BLOCKS, 2 * BLOCKS)
    sums = [checksum(base) for base in bases]
    assert copies(page).decode(targets, bases) == sums
    coarse = [error(page, block) for block in range(BLOCKS)]
    assert copies(page).refine(targets, bases, fines) == [
        Decoded(sum_, None if fine is None else True)
        for sum_, fine in zip(sums, fines, strict=True)
    ]
    finer = [error(page, block) for block in range(BLOCKS)]
    assert coarse[0] == finer[0] == 0
    assert all(0 < new < old / 3 for new, old in zip(finer[1:], coarse[1:], strict=True))


def test_a_fine_part_that_is_wrong_or_of_another_base_is_not_used() -> None:
    page = filled()
    records = stored(page)
    (_, one), (base, two), (_, three) = records[1:4]
    assert one is not None
    assert two is not None
    assert three is not None
    targets = [BLOCKS + 2]
    copies(page).decode(targets, [memoryview(base)])
    coarse = page.memory[0][BLOCKS + 2].tobytes()
    flipped = bytearray(two.record)
    flipped[100] ^= 1
    for fine in (
        Fine(memoryview(flipped), two.checksum),  # its bytes changed
        one,  # of another block
        Fine(memoryview(base), checksum(base)),  # no fine part at all
        Fine(two.record[:64], checksum(two.record[:64])),  # cut short
        Fine(memoryview(bytes(1 << 20)), 0),  # larger than any
    ):
        page.memory[0][BLOCKS + 2] = 0
        (decoded,) = copies(page).refine(targets, [memoryview(base)], [fine])
        assert decoded == Decoded(checksum(base), refined=False)
        assert page.memory[0][BLOCKS + 2].tobytes() == coarse


def test_a_batch_larger_than_private_memory_is_cut() -> None:
    many = 400
    page = pages([[place("K", 4, 16, 64)], [place("V", 4, 16, 64)]], DType.BF16, blocks=many)
    for block in range(8):
        page.fill(block, made_up(page.shape, block))
    encoded = copies(page).encode(range(8))
    bases = [bytes(each.base) for each in encoded]
    fines = [bytes(each.fine or b"") for each in encoded]
    assert many * (len(bases[0]) + len(fines[0])) > 2 << 20
    fine = [Fine(memoryview(fines[b % 8]), checksum(fines[b % 8])) for b in range(many)]
    done = copies(page).refine(range(many), [memoryview(bases[b % 8]) for b in range(many)], fine)
    assert done == [Decoded(checksum(bases[b % 8]), refined=True) for b in range(many)]
    for layer in page.memory:
        for block in range(8, many):
            assert np.array_equal(layer[block], layer[block % 8])


def test_a_record_too_large_is_none_and_the_others_are_decoded() -> None:
    page = filled()
    records = [memoryview(base) for base, _ in stored(page)]
    records[1] = memoryview(bytes(page.coder().record_nbytes + 1))
    done = copies(page).decode(range(BLOCKS, 2 * BLOCKS), records)
    assert done == [None if at == 1 else checksum(each) for at, each in enumerate(records)]


def test_exact_copies_have_no_fine_parts() -> None:
    page = filled()
    encoded = copies(page, lossy=False).encode(range(BLOCKS))
    assert {Header.parse(each.base).form for each in encoded} <= {Form.L3, Form.RAW}
    assert [each.fine for each in encoded] == [None] * BLOCKS
