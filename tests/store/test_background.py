"""Background tasks go on after errors that nobody expected, and the errors are seen."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.store.deletes import FORGET_BLOCKS
from kvstore.system.background import AGAIN_S_MAX, keep_running
from tests.sim.loop import SimLoop
from tests.store.node import SPEC, Node, chain

A = chain(1)

Find = Callable[[Node], tuple[Any, str]]
TASKS: dict[str, Find] = {
    "house": lambda node: (node.store._leases, "expire"),
    "cap": lambda node: (node.arena.holes, "give_back"),
    "holes": lambda node: (node.arena.holes, "punched"),
    "write_behind": lambda node: (node.planner.writes, "take"),
    "devices": lambda node: (node.file and node.file.devices[0].watch, "oldest_s"),
    "upload": lambda node: (node.store._objects and node.store._objects._upload, "upload"),
    "bucket": lambda node: (node.objects._upkeep, "_note"),
}


class Bug:
    """Breaks one call of a part, once; counts the calls after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: Any, name: str) -> None:
        self.after: int | None = None
        real = getattr(type(part), name)
        if isinstance(real, property):
            monkeypatch.setattr(type(part), name, property(lambda _: self.call(real.fget, part)))
        else:
            monkeypatch.setattr(part, name, lambda *args: self.call(real, part, *args))

    def call(self, real: Callable[..., Any], *args: Any) -> Any:
        if self.after is None:
            self.after = 0
            raise ZeroDivisionError("a bug")
        self.after += 1
        return real(*args)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_that_meets_a_bug_is_counted_logged_and_goes_on(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Node(tmp_path / "kv", bucket=tmp_path / "bucket", hang_s=2.0) as node:
        node.put(A, 0, 2, durable=True)
        bug = Bug(monkeypatch, *TASKS[task](node))

        async def until_it_goes_on() -> None:
            while not bug.after:
                if task == "cap":
                    node.arena.growth.set_capacity(1 << 20)
                    node.store.caps._resized.set()
                if task == "bucket":
                    node.objects._upkeep._wake.set()
                await asyncio.sleep(0.05)

        with caplog.at_level(logging.ERROR):
            node.run(until_it_goes_on())
        assert node.metrics.totals()["task_failures"] == {task: 1}
        assert [record for record in caplog.records if f"name={task} " in record.getMessage()]
        node.put(A, 2, 3, durable=True)
        assert node.get(A) == 3


def test_a_sync_that_meets_a_bug_leaves_nothing_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be synced is not called durable, and is written later."""
    with Node(tmp_path / "kv") as node:
        assert node.file is not None
        bug = Bug(monkeypatch, node.file.frames, "sync")
        answer = node.put(A, 0, 2, durable=True)
        assert bug.after is not None
        assert not answer.durable
        node.write_behind._retry.at = 0.0
        assert node.flush()
        assert bug.after
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 2


def test_the_pause_grows_to_a_bound() -> None:
    """A bug that comes back at once costs neither the processor nor the disk of the log."""
    loop = SimLoop(Random(0))
    began: list[float] = []
    failed: list[str] = []

    async def work() -> None:
        began.append(loop.time())
        if len(began) < 12:
            raise ZeroDivisionError

    loop.run_until_complete(keep_running("work", work, failed.append))
    loop.close()
    pauses = [after - before for before, after in itertools.pairwise(began)]
    assert pauses[0] == pytest.approx(1.0)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(AGAIN_S_MAX)
    assert failed == ["work"] * 11


@pytest.mark.parametrize("what", ["all", "namespace", "keys"])
def test_the_loop_goes_on_while_many_blocks_are_cleared(what: str, tmp_path: Path) -> None:
    keys = chain(1, 2000)
    with Node(tmp_path / "kv", arena_bytes=40 << 20) as node:
        for begin in range(0, len(keys), 500):
            node.put(keys, begin, begin + 500)
        left: list[int] = []

        async def beats() -> int:
            deletes = node.store.deletes
            work = deletes.clear(None if what == "all" else SPEC.id)
            if what == "keys":
                work.close()
                work = deletes.delete(SPEC.id, keys)
            deleting = asyncio.create_task(work)
            while not deleting.done():
                left.append(node.planner.index.blocks_of(SPEC.id))
                await asyncio.sleep(0)
            return await deleting

        assert node.run(beats()) == len(keys)
        steps = [before - after for before, after in itertools.pairwise(left)]
        assert 0 < max(steps) <= FORGET_BLOCKS
        assert left[-1] == 0
    with Node(tmp_path / "kv") as node:
        assert node.get(keys[:24]) == 0


def test_a_clear_that_is_cancelled_is_finished_by_the_next(tmp_path: Path) -> None:
    keys = chain(1, 600)
    with Node(tmp_path / "kv", arena_bytes=40 << 20) as node:
        node.put(keys, durable=True)
        burial = node.store.deletes.burial(None, None)

        async def cancelled() -> None:
            task = asyncio.create_task(burial.run())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        node.run(cancelled())
        assert 0 < node.planner.index.blocks_of(SPEC.id) < len(keys)
        assert node.run(burial.run()) == len(keys)
    with Node(tmp_path / "kv") as node:
        node.recall()
        assert node.planner.index.blocks_of(SPEC.id) == 0


def test_the_gauges_are_set_when_something_has_changed_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many idle tenants would take a part of the event loop twice a second for nothing."""
    with Node(tmp_path / "kv") as node:
        published: list[object] = []
        publish = node.metrics.publish

        def counted(stats: Mapping[str, Any], left: Mapping[tuple[str, str], int]) -> None:
            published.append(stats)
            publish(stats, left)

        monkeypatch.setattr(node.metrics, "publish", counted)
        node.run(node.store.keep_house())
        published.clear()
        for _ in range(3):
            node.run(node.store.keep_house())
        assert not published
        node.put(chain(1), durable=True)
        node.run(node.store.keep_house())
        assert published
        assert node.metrics.blocks.labels("file")._value.get() == 24
