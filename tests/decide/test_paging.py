"""Keys of all blocks, page by page: each of those that stay once, and few looked at in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.decide import paging
from kvstore.decide.index import Index, StoredBlock
from kvstore.decide.rows import SPLIT_ROWS
from kvstore.decide.walks import WALK_ROWS, Walks
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.testing.samples import sample_keys
from tests.decide.planner.spaces import at_once

OURS, THEIRS = NamespaceId(bytes(32)), NamespaceId(bytes([1]) * 32)
SPLIT = SPLIT_ROWS + 5000


def filled(keys: list[BlockKey], theirs: int = 0) -> Index:
    """Return an index with keys; one in so many is of the other namespace."""
    index = Index()
    for at, key in enumerate(keys):
        mine = not theirs or at % theirs
        index.add(StoredBlock(key, OURS if mine else THEIRS, at, None))
    return index


def pages(
    index: Index,
    limit: int,
    namespace_id: NamespaceId | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[BlockKey]:
    found: list[BlockKey] = []
    while True:
        steps = paging.page(index, namespace_id, found[-1] if found else None, limit)
        page = at_once(steps)
        assert len(page) <= limit
        found += page
        if len(page) < limit:
            return found
        between()


@pytest.mark.parametrize("blocks", [0, 1, 700, SPLIT])
def test_every_block_is_on_one_page(blocks: int) -> None:
    keys = sample_keys("paged", blocks)
    index = filled(keys, theirs=7)
    found = pages(index, max(10, blocks // 40))
    assert len(found) == blocks
    assert set(found) == set(keys)
    theirs = set(keys[::7])
    of_theirs = pages(index, max(10, blocks // 100), THEIRS)
    assert of_theirs == [key for key in found if key in theirs]


def test_what_stays_is_found_while_others_come_and_go_and_the_table_is_split() -> None:
    keys = sample_keys("stay", SPLIT_ROWS - 2000)
    index, others = filled(keys), iter(sample_keys("others", 20_000))
    gone: list[BlockKey] = []

    def change() -> None:
        for _ in range(400):
            gone.append(next(others))
            index.add(StoredBlock(gone[-1], OURS, 0, None))
        for each in gone[-300:]:
            index.remove(index.by_key(each))  # type: ignore[arg-type]

    found = pages(index, 2000, OURS, change)
    assert index.rows.shards[0] is not index.rows.shards[1]
    assert len(set(found)) == len(found)
    assert set(keys) <= set(found)


def test_a_page_looks_at_few_keys_in_a_step_and_not_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = filled(sample_keys("large", SPLIT))
    looked_at = 0
    kept = Walks.kept

    def counted(walks: Walks, keys: list[BlockKey], only: Any) -> list[BlockKey]:
        nonlocal looked_at
        looked_at += len(keys)
        return kept(walks, keys, only)

    monkeypatch.setattr(Walks, "kept", counted)
    steps, most, total = paging.page(index, None, None, 1000), 0, 0
    while True:
        looked_at = 0
        over = next(steps, "over") == "over"
        most, total = max(most, looked_at), total + looked_at
        if over:
            break
    assert most <= WALK_ROWS
    assert total < SPLIT // 20
