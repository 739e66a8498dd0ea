"""Wait for threads, so that none still uses the caller's buffers afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvstore.model.errors import Unavailable
from kvstore.system.threads import outlive
from kvstore.system.turns import Sized

T = TypeVar("T")


class Run(Protocol):
    """Runs blocking work in the tier's threads."""

    def __call__(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]: ...


async def run_blocking(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` in a thread. If cancelled, return only when the thread is done with it.

    A thread cannot be stopped: if the caller went on, it would free a slot while the thread still
    writes to it. Work that has not begun is cancelled at once.
    """
    (result,) = await run_all_blocking(executor, [work])
    return result


async def run_all_blocking(executor: Executor, works: Sequence[Callable[[], T]]) -> list[T]:
    """Run several works. When all have ended, raise the error of the first that failed."""
    return await Jobs(executor, works).ended()


def all_or_raise(outcomes: Sequence[T | BaseException]) -> list[T]:
    """Return the results of jobs that have all ended, or raise the first error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


class Jobs(Generic[T]):
    """Works that threads have begun with. The caller must await `ended`.

    Futures of asyncio take five turns of the event loop for this, and this takes one. They would
    make the promotion of a single block a tenth slower.
    """

    def __init__(self, executor: Executor, works: Sequence[Callable[[], T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._ended: list[Future[T]] = []
        self._jobs = [_begin(executor, work) for work in works]
        for job in self._jobs:
            job.add_done_callback(self._end)

    async def ended(self) -> list[T]:
        """Return the results. If cancelled, return only when no thread works on any of them."""
        cancelled: asyncio.CancelledError | None = None
        while len(self._ended) < len(self._jobs):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as error:
                cancelled = error  # raised once, below
                for job in self._jobs:
                    job.cancel()
        # A future keeps its callbacks, so it and this form a cycle, which nobody may collect.
        jobs, self._jobs, self._ended = self._jobs, [], []
        if cancelled is not None:
            raise cancelled
        try:
            return [job.result() for job in jobs]
        except CancelledError as error:  # raised for work that waited when the pool was shut down
            raise Unavailable("the file tier is closed") from error

    def _end(self, job: Future[T]) -> None:
        """Note, in a thread, that one work has ended."""
        self._ended.append(job)
        if len(self._ended) >= len(self._jobs) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SmallJobs:
    """Small works that come in one turn of the event loop, up to `batch_nbytes` to a thread.

    Waking a thread and the event loop takes longer than a small read.
    """

    def __init__(self, executor: Executor, batch_nbytes: int) -> None:
        self._executor = executor
        self._batch_nbytes = batch_nbytes
        self._waiting: list[tuple[int, _Job]] = []

    async def run(self, nbytes: int, work: Callable[[], T]) -> T:
        """Do as `run_blocking` does."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), nbytes)
        if not self._waiting:
            loop.call_soon(self._hand_out)
        self._waiting.append((nbytes, job))
        result: T = await _done(job.future, job.take_back)
        return result

    def _hand_out(self) -> None:
        batch: list[_Job] = []
        batch_nbytes = 0
        for nbytes, job in self._waiting:
            if batch and batch_nbytes + nbytes > self._batch_nbytes:
                self._start(batch)
                batch, batch_nbytes = [], 0
            batch.append(job)
            batch_nbytes += nbytes
        self._waiting.clear()
        self._start(batch)

    def _start(self, batch: Sequence[_Job]) -> None:
        def tell(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            for job in batch:
                job.error = job.error or error  # no thread took them
                job.tell(cancelled=done.cancelled())

        try:
            work = Sized(partial(_carry_out, batch), sum(job.nbytes for job in batch))
            running = _submit(self._executor, work)
        except Unavailable as error:
            for job in batch:
                job.error = error
                job.tell()
        else:
            asyncio.wrap_future(running).add_done_callback(tell)


@dataclass(slots=True, eq=False)
class _Job:
    """A work and its result, once it has been carried out."""

    work: Callable[[], Any]
    future: asyncio.Future[Any]
    nbytes: int = 0
    wanted: bool = True
    result: Any = None
    error: BaseException | None = None

    def take_back(self) -> None:
        self.wanted = False

    def tell(self, *, cancelled: bool = False) -> None:
        if cancelled:
            self.future.cancel()
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


def _carry_out(batch: Sequence[_Job]) -> None:
    for job in batch:
        if job.wanted:
            try:
                job.result = job.work()
            except BaseException as error:  # it is raised to the caller that awaits this job
                job.error = error


def _submit(executor: Executor, work: Callable[[], T]) -> Future[T]:
    try:
        return executor.submit(work)
    except RuntimeError as error:  # it is shut down, or no thread can be started
        raise Unavailable(f"the file tier takes no work: {error}") from error


def _begin(executor: Executor, work: Callable[[], T]) -> Future[T]:
    """Return a job, which has failed if no thread can begin with it: others have begun, maybe."""
    try:
        return _submit(executor, work)
    except Unavailable as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed


async def _done(future: asyncio.Future[T], take_back: Callable[[], object]) -> T:
    """Wait for a job. If cancelled, wait until no thread works on it any more."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        take_back()
        await outlive([future])
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it
        raise
