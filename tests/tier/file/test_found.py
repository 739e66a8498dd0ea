from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.model.block import BlockKey
from kvstore.tier.file import found
from tests.tier.file.frames import (
    NAMESPACE,
    OTHER,
    key,
    killed,
    put,
    segments,
    tombstone,
    verify,
)
from tests.tier.file.frames import unrecalled as opened


@pytest.fixture(params=[found.SHARED_ENTRIES, 2], ids=["one thread", "two threads"], autouse=True)
def _shared_entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few entries are sorted by one thread; here by two, too."""
    monkeypatch.setattr(found, "SHARED_ENTRIES", request.param)


def test_a_key_finds_the_runs_that_hold_it_and_each_comes_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            for sequence, names in enumerate(["ab", "bc", "de"], start=1):
                await put(tier, sequence, names)
            await tier.durability.sync()
        async with opened(tmp_path) as tier:
            assert tier.recall.unrecalled_runs == 3
            assert tier.recall.found_namespaces == {NAMESPACE}
            assert tier.recall.take([key("x")]) == []
            records = tier.recall.take([key("b"), key("x")])
            assert [record.header.sequence for record in records] == [1, 2]
            for record in records:
                await verify(tier, record)
            assert tier.recall.take([key("a"), key("b")]) == []
            assert [r.header.sequence for r in tier.recall.take_oldest(9)] == [3]
            assert tier.recall.unrecalled_runs == 0
            assert tier.recall.take([key("d")]) == tier.recall.take_oldest(9) == []

    asyncio.run(main())


def test_the_others_come_by_age_whatever_segment_they_are_in(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            for sequence in (5, 3, 9, 1, 7):  # as parallel writes may end
                await put(tier, sequence, [f"{sequence}-{i}" for i in range(16)], nbytes=40_000)
            await tier.durability.sync()
        async with opened(tmp_path) as tier:
            assert len(segments(tmp_path)) > 2
            assert [r.header.sequence for r in tier.recall.take([key("7-3")])] == [7]
            order = [r.header.sequence for _ in range(4) for r in tier.recall.take_oldest(1)]
            assert order == [1, 3, 5, 9]

    asyncio.run(main())


def test_keys_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "a")
            await tier.durability.sync()
        alike = BlockKey(key("a")[:8] + bytes(24))
        async with opened(tmp_path) as tier:
            (record,) = tier.recall.take([alike])
            assert [block.key for block in record.header.blocks] == [key("a")]

    asyncio.run(main())


def test_tombstones_old_and_new_kill_what_is_not_recalled_yet(tmp_path: Path) -> None:
    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            await put(tier, 1, "ab")
            await put(tier, 2, "cd")
            await put(tier, 3, "ef", namespace=OTHER)
            await tier.frames.write_tombstone(tombstone(4, "a"))
            await put(tier, 5, "a")
            await tier.durability.sync()
        async with opened(tmp_path) as tier:
            tier.recall.kill([tombstone(6, "c"), tombstone(7, "", OTHER)])
            records = tier.recall.take_oldest(9)
            assert [(r.header.sequence, r.live) for r in records] == [
                (1, (1,)),
                (2, (1,)),
                (5, (0,)),
            ]
            assert tier.recall.unrecalled_runs == 0
            await tier.upkeep.settle()
            assert tier.space.freeing_nbytes == 0  # the dead one is won back

    asyncio.run(main())
