"""A block keeps its records in as little memory as their number allows, and in their order."""

from __future__ import annotations

import random

import pytest

from kvstore.decide.index import LISTED_MAX, Index, StoredBlock, StoredPart
from kvstore.model.block import BlockKey, NamespaceId, Part


@pytest.mark.parametrize("seed", range(20))
def test_records_come_and_go_in_any_number(seed: int) -> None:
    draw = random.Random(seed)
    block = StoredBlock(BlockKey(bytes(32)), NamespaceId(bytes(32)), 0, None)
    expected: dict[Part, StoredPart] = {}
    for _ in range(200):
        part = Part(draw.randrange(2), draw.randrange(LISTED_MAX + 1))
        if (record := expected.pop(part, None)) is not None:
            block.remove(record)
        else:
            expected[part] = StoredPart(part, 1, 2)
            block.add(expected[part])
        assert list(block.records) == list(expected.values())
        for each in range(LISTED_MAX + 1):
            for part in (Part(0, each), Part(1, each)):
                assert block.record(part) is expected.get(part)


def test_equal_sizes_are_one_number_and_too_many_are_harmless() -> None:
    index = Index()
    first, again = int("300001"), int("300001")
    assert index.own_size(first) is index.own_size(again)
    for nbytes in range(10_000):
        assert index.own_size(nbytes) == nbytes
