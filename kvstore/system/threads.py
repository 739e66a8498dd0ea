"""Threads that work in buffers of their callers. They cannot be stopped: whoever goes on while one
still runs gives away buffers that it writes into.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A pool whose `submit` takes a work, or raises and never runs it.

    The standard one queues a work before it starts a thread for it. If there can be none (a bound
    on processes, no memory), it raises, and runs the work later, when nobody knows of it.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        work = _Work(partial(fn, *args, **kwargs))
        try:
            return super().submit(work)
        except BaseException:
            ended: Future[T] | None = work.revoke()
            if ended is None:
                raise
            return ended


class _Work:
    """A work that runs once, unless it is revoked before."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None

    def __call__(self) -> Any:
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return None
            try:
                self._result = work()
            except BaseException as error:
                self._error = error
                raise
            return self._result

    def revoke(self) -> Future[Any] | None:
        """Keep it from running. If another thread has taken it, wait for its end, and return what
        became of it."""
        with self._lock:
            if self._work is not None:
                self._work = None
                return None
        ended: Future[Any] = Future()
        if self._error is not None:
            ended.set_exception(self._error)
        else:
            ended.set_result(self._result)
        return ended


async def ended(jobs: Collection[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """Wait until all have ended, or the time is over."""
    if jobs:
        await asyncio.wait(jobs, timeout=timeout_s)


async def outlive(jobs: Collection[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """The same, however often the caller is cancelled meanwhile.

    For callers that have been cancelled, or are about to raise: what cancels them here is not told.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while left := [job for job in jobs if not job.done()]:
        left_s = None if until is None else until - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(left, timeout=left_s)
