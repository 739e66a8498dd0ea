"""Pools that cannot start a thread: a work that was refused never runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvstore.model.errors import Unavailable
from kvstore.system.threads import Threads
from kvstore.system.turns import TurnPool
from kvstore.tier.file.threads import Jobs

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


def test_a_refused_work_that_runs_already_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has become free takes it before the refusal is known."""
    ended = threading.Event()
    with Threads(2) as threads:
        work, begun, go_on = busy()
        threads.submit(work)
        assert begun.wait(LONG_S)
        slow, slow_begun, slow_on = busy()

        def taken_first(_: threading.Thread) -> None:
            go_on.set()
            assert slow_begun.wait(LONG_S)
            threading.Timer(0.2, slow_on.set).run()
            raise RuntimeError("can't start new thread")

        def both() -> None:
            slow()
            ended.set()

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", taken_first)
            with pytest.raises(RuntimeError):
                threads.submit(both)
        assert ended.is_set()


def test_a_turn_that_finds_no_thread_fails_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = TurnPool(1, "test")
    user = pool.user(1.0)
    try:
        with no_new_threads(monkeypatch):
            refused = user.submit(lambda: "refused")
        with pytest.raises(RuntimeError, match="start new thread"):
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
