"""The order of turns, whatever the server does."""

from __future__ import annotations

import random

import pytest

from kvstore_bench.chat.schedule import ORDERS, Job, Order, Schedule, schedule
from kvstore_bench.chat.workloads.generator import Shape, SizeRange, generate
from kvstore_bench.chat.workloads.workload import Conversation


def chats(conversations: int, turns: int) -> list[Conversation]:
    return generate(Shape(conversations, turns, SizeRange(10, 20)))


def drain(jobs: Schedule, at_once: int, seed: int) -> list[Job]:
    """Run the schedule with `at_once` places; which job ends next is drawn."""
    lots = random.Random(seed)
    running: list[Job] = []
    started: list[Job] = []
    while len(jobs) or running:
        job = jobs.take() if len(running) < at_once else None
        if job is None:
            jobs.finished(running.pop(lots.randrange(len(running))))
            continue
        assert job.position not in {other.position for other in running}
        running.append(job)
        started.append(job)
    return started


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_every_turn_is_asked_once_and_after_the_one_before_it(order: Order, at_once: int) -> None:
    conversations = [one.first_turns(2 + n % 3) for n, one in enumerate(chats(7, 4))]
    for seed in range(5):
        started = drain(schedule(conversations, order, (1, 9), seed=seed), at_once, seed)
        for position, one in enumerate(conversations):
            turns = [job.turn for job in started if job.position == position]
            assert turns == list(range(1, one.turns + 1))


def test_a_barrier_lets_a_round_end_before_the_next() -> None:
    jobs = schedule(chats(3, 2), "barrier", (1, 2))
    first = [jobs.take() for _ in range(3)]
    assert [job.turn for job in first if job] == [1, 1, 1]
    for job in first:
        assert jobs.take() is None
        assert job is not None
        jobs.finished(job)
    assert jobs.take() == Job(0, 2)


def test_fifo_goes_on_with_whoever_has_waited_longest() -> None:
    jobs = schedule(chats(3, 2), "fifo", (1, 2))
    assert [jobs.take() for _ in range(3)] == [Job(0, 1), Job(1, 1), Job(2, 1)]
    jobs.finished(Job(2, 1))
    jobs.finished(Job(0, 1))
    assert [jobs.take(), jobs.take(), jobs.take()] == [Job(2, 2), Job(0, 2), None]


def test_random_depends_on_the_seed_alone() -> None:
    runs = [drain(schedule(chats(9, 3), "random", (1, 3), seed=s), 1, 0) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("order", ORDERS)
def test_an_abandoned_dialogue_is_not_asked_again(order: Order) -> None:
    jobs = schedule(chats(2, 3), order, (1, 3))
    job = jobs.take()
    assert job is not None
    assert jobs.abandon(job.position) == 2
    assert len(jobs) == 3
    jobs.finished(job)
    assert {other.position for other in drain(jobs, 1, 0)} == {1 - job.position}
