"""Nothing that a node does looks at all of its blocks in one turn of the loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.policy import key
from tests.store.node import Node
from tests.store.turns import TINY, CountedLoop, counting, fill, put

BLOCKS = 20_000
IN_ONE_TURN = 2048
SMALL = dataclasses.replace(TINY, identity=(("model", "small"),))
NEW = dataclasses.replace(TINY, identity=(("model", "new"),))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node of which the write budget has kept all but a few blocks in the arena."""
    options: dict[str, Any] = {"write_on_demotion": True, "write_bytes_per_day": 1}
    path = tmp_path_factory.mktemp("walks")
    with Node(path, arena_bytes=128 << 20, loop=CountedLoop(), **options) as node:
        fill(node, TINY, BLOCKS)
        node.planner.index.rest()
        yield node


async def scan(node: Node) -> None:
    assert len(await node.store.report.scan(None, None, 1500)) == 1500


async def scan_a_small_one(node: Node) -> None:
    assert await node.store.report.scan(SMALL.id, None, 1500) == []


async def flush(node: Node) -> None:
    assert not await node.store.puts.flush(20), "the budget keeps it out"


async def stats(node: Node) -> None:
    assert node.store.report.stats()["blocks"] == BLOCKS


async def keep_house(node: Node) -> None:
    await node.store.keep_house()
    await node.write_behind._policies.save()


async def register(node: Node) -> None:
    node.store.namespaces.register(NEW)
    assert len(node.store.namespaces.all()) > 1


async def draw(node: Node) -> None:
    options: dict[str, Any] = {"namespace_id": None, "prefix": None, "through": None}
    assert (await node.store.tree.look(**options, depth=1, limit=10)).blocks == BLOCKS


async def fill_holes(node: Node) -> None:
    await node.store._holes._drop_wrong(1 << 20)


WORK = [scan, scan_a_small_one, flush, stats, keep_house, register, draw, fill_holes]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_no_turn_looks_at_many_blocks(
    work: Callable[[Node], Any], full: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = full.loop
    assert isinstance(loop, CountedLoop)
    full.planner.index.rest()
    with counting(loop, monkeypatch):
        loop.turns.clear()
        full.run(work(full))
    assert max(loop.turns) <= IN_ONE_TURN
    if work in (flush, draw, fill_holes):
        assert sum(loop.turns) >= BLOCKS, "it looks at all of them"


def test_closing_looks_at_all_that_is_not_written_a_few_at_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, options = CountedLoop(), {"write_on_demotion": True, "write_bytes_per_day": 1}
    with (
        counting(loop, monkeypatch),
        Node(tmp_path, arena_bytes=64 << 20, loop=loop, **options) as node,
    ):
        fill(node, TINY, 6000)
        loop.turns.clear()
    assert max(loop.turns) <= IN_ONE_TURN < 6000 <= sum(loop.turns)


@pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
def test_clearing_looks_at_few_blocks_in_a_turn_and_leaves_none(
    everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = CountedLoop()
    with Node(None, arena_bytes=128 << 20, loop=loop) as node:
        before = fill(node, SMALL, 10)
        fill(node, TINY, BLOCKS)
        after = fill(node, SMALL, 700, first=50)
        node.planner.index.rest()
        with counting(loop, monkeypatch):
            loop.turns.clear()
            cleared = node.run(node.store.deletes.clear(None if everything else SMALL.id))
        assert cleared == len(before) + len(after) + (BLOCKS if everything else 0)
        assert max(loop.turns) <= IN_ONE_TURN
        assert node.store.report.stats()["blocks"] == BLOCKS + 710 - cleared


def test_what_is_put_where_a_clear_has_been_goes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes rows that are free, which are those that the clear has passed."""
    loop = CountedLoop()
    with Node(None, arena_bytes=64 << 20, loop=loop) as node:
        gone = fill(node, TINY, 500)
        fill(node, SMALL, 6000)
        node.run(node.store.deletes.delete(TINY.id, gone))
        index, late = node.planner.index, key(77)

        async def meanwhile() -> int:
            clearing = asyncio.ensure_future(node.store.deletes.clear(SMALL.id))
            async with asyncio.timeout(10):
                while index.blocks_of(SMALL.id) > 3000:  # noqa: ASYNC110  that is no event
                    await asyncio.sleep(0)
            await put(node, SMALL, [late])
            return await clearing

        with counting(loop, monkeypatch):
            loop.turns.clear()
            assert node.run(meanwhile()) == 6001
        assert index.by_key(late) is None
        assert index.blocks_of(SMALL.id) == 0
        assert max(loop.turns) <= IN_ONE_TURN
