"""Saves of blocks that are overwritten: what the fence lets through, what the thread outlives."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.fenced_saves import FencedJob, FencedSaves
from kvstore.model.errors import Unavailable

WITHIN_S = 5.0


class Counts:
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def add(self, **counts: float) -> None:
        self.totals.update({name: int(count) for name, count in counts.items()})


class Saves(FencedSaves[FencedJob]):
    """Each job waits until `gate` is open, with its blocks read only then."""

    def __init__(self, *, available: bool = True, jobs_max: int = 4) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.saved: list[set[int]] = []
        self.error: Exception | None = None
        self.counts = Counts()
        client: Any = SimpleNamespace(available=available)
        super().__init__(client, self.counts, jobs_max=jobs_max, reuse_wait_s=0.05)

    def save(self, job: FencedJob) -> None:
        self.begun.set()
        assert self.gate.wait(WITHIN_S)
        if self.error is not None:
            raise self.error
        if self.all_read(job):
            self.saved.append(job.blocks)


@pytest.fixture
def start() -> Iterator[Callable[..., Saves]]:
    made: list[Saves] = []

    def start(**options: Any) -> Saves:
        made.append(Saves(**options))
        return made[-1]

    yield start
    for each in made:
        each.gate.set()
        each.close(WITHIN_S)
        assert not each._thread.is_alive()


def put(saves: Saves, *jobs: set[int]) -> None:
    for blocks in jobs:
        saves.queue(partial(FencedJob, blocks))


def test_only_what_reads_the_blocks_is_given_up(start: Callable[..., Saves]) -> None:
    saves = start()
    put(saves, {1, 2}, {3}, {4})
    assert saves.begun.wait(WITHIN_S)
    saves.fence([2, 3])
    saves.gate.set()
    assert saves.drain(WITHIN_S)
    assert saves.saved == [{4}]
    assert saves.counts.totals["saves_dropped_reuse"] == 2


def test_after_a_fence_that_waited_in_vain_none_waits_for_a_while(
    start: Callable[..., Saves],
) -> None:
    saves = start()
    saves.reuse_wait_s = 0.2
    put(saves, {1}, {2})
    began = time.monotonic()
    saves.fence([1])
    assert time.monotonic() - began >= 0.2
    saves.reuse_wait_s = WITHIN_S
    began = time.monotonic()
    saves.fence([2])
    assert time.monotonic() - began < WITHIN_S / 2


def test_blocks_that_are_not_read_any_more_hold_nobody_up(start: Callable[..., Saves]) -> None:
    saves = start()
    job = FencedJob({1, 2})
    saves.queue(lambda: job)
    assert saves.reads_only(job, {2})
    saves.fence([1])
    saves.gate.set()
    assert saves.drain(WITHIN_S)
    assert saves.saved == [{2}]
    saves.gate.clear()
    job = FencedJob({3})
    saves.queue(lambda: job)
    saves.fence([3])
    assert not saves.reads_only(job, {4}), "it was given up before"


@pytest.mark.parametrize("error", [Unavailable("away"), ValueError("a defect")])
def test_the_thread_outlives_a_save_that_fails(
    start: Callable[..., Saves], error: Exception
) -> None:
    saves = start()
    saves.gate.set()
    saves.error = error
    put(saves, {1})
    assert saves.drain(WITHIN_S)
    saves.error = None
    put(saves, {2})
    assert saves.drain(WITHIN_S)
    assert saves.saved == [{2}]
    assert saves.counts.totals["saves_dropped_down"] == 1


def test_what_is_too_much_or_for_nobody_is_dropped_unmade(start: Callable[..., Saves]) -> None:
    saves = start(jobs_max=2)
    put(saves, {1}, {2})
    saves.queue(lambda: pytest.fail("it was made"))
    assert saves.counts.totals == {"saves_dropped_queue": 1}
    away = start(available=False)
    away.queue(lambda: pytest.fail("it was made"))
    assert away.counts.totals == {"saves_dropped_down": 1}


def test_to_give_up_is_to_wait_for_the_copy_that_is_under_way(start: Callable[..., Saves]) -> None:
    saves = start()
    put(saves, {1}, {2})
    assert saves.begun.wait(WITHIN_S)
    assert not saves.give_up(0.05)
    saves.gate.set()
    assert saves.give_up(WITHIN_S)
    assert saves.saved == []
    assert saves.counts.totals["saves_dropped_reuse"] == 2
