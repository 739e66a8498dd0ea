"""Threads for reads that may hang: a program ends without waiting for them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread

_Works = queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]


class ReadThreads:
    """At most `count` threads, started as works come; works begin in the order of `submit`.

    The executors of the standard library join their threads when the interpreter exits, for as
    long as a disk hangs.
    """

    def __init__(self, count: int, enter: Callable[[], object]) -> None:
        """enter: called first in every thread. If it raises, so do the works of that thread."""
        self._count = count
        self._enter = enter
        self._works: _Works = queue.SimpleQueue()
        self._threads: list[Thread] = []
        self._closed = False
        self._lock = Lock()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Raises RuntimeError, and never runs the work, after `close`, or if there can be no
        thread."""
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("no reads after close")
            if len(self._threads) < self._count:
                self._start_one()
            self._works.put((future, work))
        return future

    def close(self) -> None:
        """Cancel what has not begun; threads end after the work they have. Waits for none."""
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    if (item := self._works.get_nowait()) is not None:
                        item[0].cancel()
            for _ in self._threads:
                self._works.put(None)

    def _start_one(self) -> None:
        name = f"kvstore-files_{len(self._threads)}"
        thread = Thread(target=_run, args=(self._works, self._enter), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more; those that are there suffice
            if not self._threads:
                raise
            return
        self._threads.append(thread)


def _run(works: _Works, enter: Callable[[], object]) -> None:
    failure: Exception | None = None
    try:
        enter()
    except Exception as error:
        failure = error
    while (item := works.get()) is not None:
        _work(item[0], item[1], failure)
        del item  # what it refers to is memory of the caller


def _work(future: Future[None], work: Callable[[], None], failure: Exception | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        if failure is not None:
            raise failure
        work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
