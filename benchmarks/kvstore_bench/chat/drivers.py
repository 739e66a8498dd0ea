"""When requests start. A driver takes jobs in its order and waits for what each must wait for.

- closed: the next request starts as soon as one has ended, `limit` at once (closed loop).
- arrivals: requests start at given times, whatever the server does (open loop).
- clients: each client's requests arrive by a process of its own, one conversation at a time.
- recorded: each turn starts when its source says it is due.

In all of them a turn waits for the turn before it. Every wait ends: a request has a deadline, and
something is in flight whenever jobs are left but none may start.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from kvstore_bench.chat.schedule import Job, Schedule
from kvstore_bench.chat.workloads.workload import Dialogue

Arrivals = Literal["poisson", "uniform", "constant"]


class Asker(Protocol):
    """Sends requests and knows when to stop."""

    @property
    def over(self) -> asyncio.Event:
        """Return what is set once no request may be started any more."""
        ...

    def elapsed_s(self) -> float:
        """Return the seconds since the run started."""
        ...

    async def ask(self, job: Job, due_s: float | None) -> bool:
        """Send one request and wait for its end; return whether the dialogue can go on."""
        ...


def gaps_s(rate: float, arrivals: Arrivals, stream: random.Random) -> Iterator[float]:
    """Yield the times between arrivals, without end; their mean is 1 / rate seconds.

    uniform is anything from none to twice the mean, as SGLang's tools have it.
    """
    while True:
        if arrivals == "poisson":
            yield stream.expovariate(rate)
        else:
            yield (2 * stream.random() if arrivals == "uniform" else 1.0) / rate


async def by_schedule(
    asker: Asker, schedule: Schedule, *, limit: int, gaps: Iterator[float] | None
) -> None:
    """Drive a closed loop, or with gaps an open one; at most `limit` requests at once."""
    moved = asyncio.Event()
    in_flight = 0

    async def ask(job: Job, due_s: float | None) -> None:
        nonlocal in_flight
        goes_on = await asker.ask(job, due_s)
        in_flight -= 1
        if not goes_on:
            schedule.abandon(job.position)
        schedule.finished(job)
        moved.set()

    due_s = 0.0
    async with asyncio.TaskGroup() as group:
        while len(schedule) and not asker.over.is_set():
            job = schedule.take() if in_flight < limit else None
            if job is None:
                moved.clear()
                await moved.wait()
                continue
            if gaps is not None:
                due_s += next(gaps)
                await _until(asker, due_s)
                if asker.over.is_set():
                    return
            in_flight += 1
            group.create_task(ask(job, None if gaps is None else due_s))


async def by_clients(
    asker: Asker,
    dialogues: Sequence[Dialogue],
    turns: tuple[int, int],
    *,
    clients: int,
    rate: float,
    arrivals: Arrivals,
    seed: int,
) -> None:
    """Drive clients that take whole dialogues in order and ask at `rate` requests/s each."""
    waiting = iter(range(len(dialogues)))

    async def client(number: int) -> None:
        stream = random.Random(f"kvstore-bench/arrivals/{seed}/{number}")
        gaps = gaps_s(rate, arrivals, stream)
        due_s = 0.0
        for position in waiting:
            for turn in _span(dialogues[position], turns):
                due_s += next(gaps)
                await _until(asker, due_s)
                if asker.over.is_set():
                    return
                if not await asker.ask(Job(position, turn), due_s):
                    break

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))


async def by_due_times(
    asker: Asker, dialogues: Sequence[Dialogue], turns: tuple[int, int], *, limit: int | None
) -> None:
    """Drive recorded times. A session that had to wait for the limit keeps its own pauses."""
    slots = asyncio.Semaphore(limit or len(dialogues))
    start_s = {n: _due(one, turns[0]) for n, one in enumerate(dialogues) if one.turns >= turns[0]}

    async def session(position: int, late_s: float) -> None:
        for turn in _span(dialogues[position], turns):
            due_s = _due(dialogues[position], turn) + late_s
            await _until(asker, due_s)
            if asker.over.is_set() or not await asker.ask(Job(position, turn), due_s):
                break
        slots.release()

    async with asyncio.TaskGroup() as group:
        for position in sorted(start_s, key=start_s.__getitem__):
            await _until(asker, start_s[position])
            late_s = 0.0
            if slots.locked():
                await slots.acquire()
                late_s = max(0.0, asker.elapsed_s() - start_s[position])
            else:
                await slots.acquire()
            if asker.over.is_set():
                return
            group.create_task(session(position, late_s))


def _due(dialogue: Dialogue, turn: int) -> float:
    due_s = dialogue.due_s(turn)
    assert due_s is not None, "the runner takes this driver for workloads with due times only"
    return due_s


def _span(dialogue: Dialogue, turns: tuple[int, int]) -> range:
    return range(turns[0], min(turns[1], dialogue.turns) + 1)


async def _until(asker: Asker, due_s: float) -> None:
    wait_s = due_s - asker.elapsed_s()
    if wait_s > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asker.over.wait()
