"""Pools that cannot start a thread: a work that was refused never runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvstore.model.errors import Unavailable
from kvstore.system.threads import Threads
from kvstore.system.turns import TurnPool
from kvstore.testing.wait import until
from kvstore.tier.file.threads import Jobs, SmallJobs

LONG_S = 10.0


@contextmanager
def no_new_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As beyond the bound on processes of a container."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def busy() -> tuple[Callable[[], str], threading.Event, threading.Event]:
    """Return a work that takes until it is let go, and when it has begun."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(LONG_S)
        return "busy"

    return work, begun, go_on


def test_a_work_that_is_refused_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    work, begun, go_on = busy()
    ran: list[str] = []
    with Threads(2) as threads:
        first = threads.submit(work)
        assert begun.wait(LONG_S)
        with no_new_threads(monkeypatch), pytest.raises(RuntimeError, match="start new thread"):
            threads.submit(ran.append, "refused")
        go_on.set()
        assert first.result(LONG_S) == "busy"
        threads.submit(ran.append, "later").result(LONG_S)
    assert ran == ["later"]


def taken_by_another(
    monkeypatch: pytest.MonkeyPatch, go_on: threading.Event, ended: threading.Event
) -> None:
    """Let a busy thread go, which takes what was just queued, before it is known that no thread can
    be started for it."""

    def start(_: threading.Thread) -> None:
        go_on.set()
        assert ended.wait(LONG_S)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("fails", [False, True])
def test_a_work_that_another_thread_has_taken_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    work, begun, go_on = busy()
    ended = threading.Event()

    def last() -> str:
        ended.set()
        time.sleep(0.1)
        if fails:
            raise ValueError("its own")
        return "taken"

    with Threads(2) as threads:
        threads.submit(work)
        assert begun.wait(LONG_S)
        with monkeypatch.context() as patch:
            taken_by_another(patch, go_on, ended)
            found = threads.submit(last)
        assert found.done()
        if fails:
            with pytest.raises(ValueError, match="its own"):
                found.result()
        else:
            assert found.result() == "taken"


def test_a_turn_that_another_thread_has_taken_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = TurnPool(2, "test")
    user = pool.user(1.0)
    work, begun, go_on = busy()
    ended = threading.Event()
    try:
        first = user.submit(work)
        assert begun.wait(LONG_S)
        with monkeypatch.context() as patch:
            taken_by_another(patch, go_on, ended)
            second = user.submit(ended.set)
        assert first.result(LONG_S) == "busy"
        second.result(LONG_S)
        until(lambda: pool._free == 2)
    finally:
        pool.close()


def test_a_turn_that_finds_no_thread_fails_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = TurnPool(1, "test")
    user = pool.user(1.0)
    try:
        with no_new_threads(monkeypatch):
            refused = user.submit(lambda: "refused")
        with pytest.raises(Unavailable, match="start new thread"):
            refused.result(LONG_S)
        assert user.submit(lambda: "taken").result(LONG_S) == "taken"
    finally:
        pool.close()


def test_jobs_of_which_one_cannot_begin_are_over_when_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def course() -> None:
        work, begun, go_on = busy()
        ran: list[str] = []
        with Threads(2) as threads:
            threads.submit(lambda: None).result(LONG_S)
            threads.submit(work)
            assert begun.wait(LONG_S)
            with no_new_threads(monkeypatch):
                jobs = Jobs(threads, [lambda: ran.append("refused")])
            go_on.set()
            with pytest.raises(Unavailable, match="takes no work"):
                await jobs.ended()
        assert not ran

    asyncio.run(course())


@pytest.mark.parametrize("shared", [False, True])
def test_a_small_work_that_no_thread_takes_has_failed(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    pool = TurnPool(1, "test")

    async def course() -> None:
        ran: list[str] = []
        with Threads(1) as threads, no_new_threads(monkeypatch):
            jobs = SmallJobs(pool.user(1.0) if shared else threads, 1 << 20)
            with pytest.raises(Unavailable, match="work"):
                await jobs.run(10, lambda: ran.append("refused"))
        assert not ran

    try:
        asyncio.run(course())
    finally:
        pool.close()
