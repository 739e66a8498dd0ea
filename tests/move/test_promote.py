"""What comes up first, while a long prefix is on its way."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from random import Random

import pytest

from kvstore.decide.planner import DAEMON_SESSION, Read
from kvstore.model.block import Grant, Span
from kvstore.testing.disks import FaultyDisk
from tests.sim.loop import SimLoop
from tests.store.node import FULL, SPEC, Node, chain

A = chain(1)


def read_times(path: Path, io_s: float) -> tuple[float, list[float]]:
    """Bring a prefix up; return when its first block was there, and when the disk was asked."""
    with Node(path) as node:
        node.put(A, durable=True)
    loop = SimLoop(Random(7))
    disk = FaultyDisk()
    with Node(path, disk=disk, loop=loop) as node:
        loop.threads.io_s = io_s
        asked: list[float] = []
        disk.fault = lambda call: asked.append(loop.time()) if call == "preadv" else None

        async def promote() -> float:
            acquire = node.store.gets.acquire
            rest = asyncio.create_task(acquire(DAEMON_SESSION, SPEC.id, A, wait_s=20.0))
            await asyncio.sleep(0)  # it begins
            first = (Span(FULL, 0, 1),)
            await acquire(DAEMON_SESSION, SPEC.id, A[:1], wait_s=20.0, spans=first)
            up_at = loop.time()
            assert (await rest).hit_blocks == len(A)
            return up_at

        return node.run(promote()), sorted(asked)


@pytest.fixture(autouse=True)
def every_load_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.move.promote.HEAD_START_NBYTES", 0)


def test_an_idle_disk_reads_the_first_block_alone(tmp_path: Path) -> None:
    up_at, (first, *others) = read_times(tmp_path / "kv", io_s=0.0001)
    assert first < up_at <= others[0]


def test_who_is_cancelled_beside_the_first_block_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next read has been planned by then: slots are set aside for it."""
    monkeypatch.setattr("kvstore.move.promote.HEAD_START_S", 20.0)
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)
    disk, gate = FaultyDisk(), threading.Event()

    def hold(call: str) -> None:
        if call == "preadv":
            assert gate.wait(10)

    with Node(tmp_path / "kv", disk=disk) as node:
        node.recall()
        disk.fault = hold

        async def cancelled() -> None:
            acquire = node.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=20.0)
            loading = asyncio.create_task(acquire)
            await asyncio.sleep(0.1)
            assert 1 <= node.write_behind.reads.under_way <= 2, "only the first block's"
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            gate.set()

        node.run(cancelled())
        assert node.get(A) == len(A)


@pytest.mark.parametrize("turns", range(2, 12))
def test_who_is_cancelled_while_reads_are_planned_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """What was planned by then has slots, and is read."""
    monkeypatch.setattr("kvstore.move.promote.HEAD_START_NBYTES", 1 << 40)
    monkeypatch.setattr("kvstore.move.promote.STEP_NBYTES", 0)
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)
    with Node(tmp_path / "kv") as node:
        node.recall()

        async def cancelled() -> None:
            acquire = node.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=20.0)
            loading = asyncio.create_task(acquire)
            for _ in range(turns):
                await asyncio.sleep(0)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            await node.write_behind.reads.ended(10.0)

        node.run(cancelled())
        assert node.get(A) == len(A)


def test_a_slow_first_block_is_not_waited_for(tmp_path: Path) -> None:
    up_at, (*_, last) = read_times(tmp_path / "kv", io_s=1.0)
    assert last < up_at


def test_reads_of_two_loads_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk would be busy as long, and both would be up at the end."""
    prefixes = {"a": A, "b": chain(2)}
    with Node(tmp_path / "kv") as node:
        for keys in prefixes.values():
            for begin in range(0, len(keys), 4):
                node.put(keys, begin, begin + 4, durable=True)
    monkeypatch.setattr("kvstore.move.promote.STEP_NBYTES", 1)  # every read ends a step
    with Node(tmp_path / "kv") as node:
        begun = []
        start_read = node.write_behind.reads.start

        def noted(read: Read) -> None:
            begun.extend(name for name, keys in prefixes.items() if read.blocks[0].key in keys)
            start_read(read)

        monkeypatch.setattr(node.write_behind.reads, "start", noted)

        async def both() -> list[Grant]:
            acquire = node.store.gets.acquire
            loads = (acquire(DAEMON_SESSION, SPEC.id, k, wait_s=20.0) for k in prefixes.values())
            return await asyncio.gather(*loads)

        assert [grant.hit_blocks for grant in node.run(both())] == [len(A), len(A)]
        assert len(begun) > 4
        assert begun == sorted(begun)
