"""An event loop whose clock jumps to the next timer, and threads that are timers on it.

Nothing waits and nothing runs beside anything else, so one seed gives one course of events.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context, ContextVar
from random import Random
from typing import Any

OWNER: ContextVar[str] = ContextVar("owner", default="-")
"""Whose tasks are made in this context. A task, and what it starts, belongs to its maker."""


STILL_TURNS_MAX = 10_000


class Stuck(Exception):
    """Every task waits for something that no timer will bring."""


class _Jump(selectors.DefaultSelector):
    """Waits by moving the clock.

    It moves by a hair, too, when it has stood still for many turns, because a real clock does: one
    who waits for less than the clock can tell apart would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._still = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck
        self._still = 0 if timeout else self._still + 1
        self.now += timeout
        if self._still > STILL_TURNS_MAX:
            self.now = math.nextafter(self.now, math.inf)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """Virtual time. `threads` stands in for every thread pool."""

    def __init__(self, draw: Random) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self.threads = SimThreads(self, draw)
        self.unhandled: list[str] = []
        self._numbers = itertools.count(1)
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._jump.now

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        threads = executor if isinstance(executor, SimThreads) else self.threads
        return asyncio.wrap_future(threads.submit(func, *args), loop=self)

    def tasks_of(self, owner: str) -> list[asyncio.Task[Any]]:
        """Return the tasks of one owner that have not ended, in the order in which they began."""
        tasks = [t for t in asyncio.all_tasks(self) if t.get_name().startswith(f"{owner} ")]
        return sorted(tasks, key=lambda task: task.get_name())

    def _new_task(
        self, _: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any
    ) -> asyncio.Task[Any]:
        """Number tasks by their loop, so that their order does not depend on earlier seeds."""
        context: Context | None = more.get("context")
        owner = context.get(OWNER, "-") if context is not None else OWNER.get()
        return asyncio.Task(work, loop=self, name=f"{owner} {next(self._numbers):09d}", **more)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.unhandled.append(f"{context['message']}: {context.get('exception')!r}")


class SimThreads(Executor):
    """Runs work on the loop, in one instant, somewhere between its start and its end.

    io_s: mean of each half of a blocking call, until it takes effect and until that is noticed.
    """

    io_s = 0.002

    def __init__(self, loop: SimLoop, draw: Random) -> None:
        self._loop = loop
        self._draw = draw
        self._pending: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._later(self._run, future, lambda: fn(*args, **kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Others go on using it."""

    def _later(self, work: Callable[..., object], *args: object) -> None:
        self._loop.call_later(self._draw.expovariate(1 / self.io_s), work, *args)

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except Exception as error:
            self._later(future.set_exception, error)
        else:
            self._later(future.set_result, result)
