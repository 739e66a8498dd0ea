"""Who finds room, in the file tier and in the arena, when everything is full."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import Grant, Span
from kvstore.store.room import PAUSE_MAX_S, Room
from tests.sim.loop import SimLoop
from tests.store.node import FULL, SPEC, Node, chain


@pytest.mark.parametrize("seed", range(4))
def test_runs_written_together_at_the_cap_all_find_room(tmp_path: Path, seed: int) -> None:
    loop = SimLoop(Random(seed))
    with Node(tmp_path / "kv", loop=loop, file_bytes=2 << 20, segment_nbytes=1 << 18) as node:
        loop.threads.io_s = 0.01
        for batch in range(6):
            for number in range(24):
                node.put(chain(1 + 24 * batch + number, 1 + number % 3))
            assert node.run(node.store.puts.flush(15.0))
        assert not node.write_behind.stats()["failed_writes"]
        assert node.file is not None
        assert node.file.frames.physical_nbytes <= 2 << 20


@pytest.mark.parametrize("step", [1, 7, 40])
def test_a_prefix_larger_than_the_arena_passes_through_it(tmp_path: Path, step: int) -> None:
    """The block that is put next pins its parent, and so everything before that would stay."""
    loop = SimLoop(Random(step))
    with Node(tmp_path / "kv", loop=loop, arena_bytes=1 << 20) as node:
        keys = chain(1, 200)
        for start in range(0, len(keys), step):
            assert node.put(keys, start, start + step, wait_s=5.0).refused == 0
        assert node.flush()
        assert node.store.gets.match(SPEC.id, keys).hit_blocks == len(keys)
        assert node.get(keys[:20]) == 20


def test_without_a_file_tier_the_start_of_a_prefix_stays(tmp_path: Path) -> None:
    with Node(None, loop=SimLoop(Random(1)), arena_bytes=1 << 20) as node:
        keys = chain(1, 200)
        assert node.put(keys, 0, 100).refused
        stored = node.store.gets.match(SPEC.id, keys).hit_blocks
        assert 0 < stored < 100
        assert node.put(keys, stored, stored + 1).committed == 0
        assert node.store.gets.match(SPEC.id, keys).hit_blocks == stored


def test_of_many_who_wait_one_looks_at_a_time_in_order_and_none_that_waits_for_more() -> None:
    looked: list[str] = []
    free = 0

    async def wait(room: Room, name: str, nbytes: int) -> None:
        nonlocal free
        waiting = room.enter(nbytes)
        while True:
            await waiting.look_again(10.0)
            looked.append(name)
            await asyncio.sleep(0)  # a look takes several steps
            if nbytes <= free:
                free -= nbytes
                break
        waiting.leave()

    async def main() -> None:
        nonlocal free
        room = Room()
        names = {"first": 4, "second": 4, "small": 2, "fourth": 4}
        tasks = [asyncio.create_task(wait(room, *each)) for each in names.items()]
        await asyncio.sleep(0)

        async def expect(*wanted: str) -> None:
            looked.clear()
            room.set()
            await asyncio.sleep(2 * PAUSE_MAX_S)
            assert tuple(looked) == wanted

        await expect("first", "small")  # one who wants as much finds none either
        free = 3
        await expect("first", "small")
        free = 9
        await expect("first", "second", "fourth")
        free = 4
        await expect("fourth")
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_what_changes_while_one_looks_is_looked_at_again() -> None:
    async def main() -> int:
        room, looks = Room(), 0
        waiting = room.enter(1)
        while looks < 2:
            if looks == 0:
                asyncio.get_running_loop().call_soon(room.set)
            async with asyncio.timeout(5.0):
                await waiting.look_again(10.0)
            looks += 1
            room.set()  # while it looks
        waiting.leave()
        room.set()
        return looks

    assert asyncio.run(main()) == 2


def test_many_reserves_that_wait_take_no_more_looks_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node(tmp_path / "kv", arena_bytes=1 << 20) as node:
        keys = chain(1, 60)
        node.put(keys, 0, 60, durable=True)
        lease = node.acquire(keys)
        looks = 0
        place = node.planner.puts.place

        def counted(*args: Any, **more: Any) -> Any:
            nonlocal looks
            looks += 1
            return place(*args, **more)

        monkeypatch.setattr(node.planner.puts, "place", counted)

        def reserve(name: int) -> Coroutine[Any, Any, Grant]:
            return node.store.puts.reserve(
                DAEMON_SESSION,
                SPEC.id,
                chain(name, 24),
                first_block=0,
                parent=None,
                spans=(Span(FULL, 0, 24),),
                wait_s=0.4,
            )

        async def several() -> int:
            waiting = [asyncio.create_task(reserve(100 + each)) for each in range(10)]
            await asyncio.sleep(0.1)
            assert node.store.puts.waiting_for_room == 10
            before = looks
            for _ in range(100):
                node.store._node.room.set()
                await asyncio.sleep(0.001)
            found = looks - before
            await asyncio.gather(*waiting)
            return found

        assert node.run(several()) <= 10  # of 100 events that made no room, for 10 that wait
        node.store.release(DAEMON_SESSION, [lease.lease_id])
