"""Turns at a disk: several users of one pool of threads, each by its weight (deficit round robin).

A user with a million queued jobs delays another user by the jobs that threads are at already, and
by one quantum of each other user, not by its queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kvstore.model.errors import Unavailable
from kvstore.system.threads import Threads

T = TypeVar("T")

QUANTUM_NBYTES = 2 << 20
JOB_NBYTES_MIN = 64 << 10  # what a job costs that says nothing, or little: a call to the disk


@dataclass(frozen=True, slots=True)
class Sized:
    """Work that says how many bytes it moves."""

    work: Callable[[], Any]
    nbytes: int

    def __call__(self) -> Any:
        return self.work()


class _Job(NamedTuple):
    cost: int
    future: Future[Any]
    work: Callable[[], Any]


class Costly(Protocol):
    """What waits for a turn. cost: bytes."""

    @property
    def cost(self) -> int: ...


J = TypeVar("J", bound=Costly)


@dataclass(slots=True, eq=False)
class Queue(Generic[J]):
    """The jobs of one user. deficit: bytes that it may still move in this round."""

    weight: float
    jobs: deque[J] = field(default_factory=deque)
    deficit: float = 0.0


class Fair(Generic[J]):
    """Whose turn it is among users that have jobs. Needs a lock where threads use it."""

    def __init__(self) -> None:
        self._round: deque[Queue[J]] = deque()

    def add(self, queue: Queue[J], job: J) -> None:
        if not queue.jobs:
            queue.deficit = 0.0
            self._round.append(queue)
        queue.jobs.append(job)

    def peek(self) -> J | None:
        """Return the job whose turn it is, None if there is none."""
        while self._round:
            queue = self._round[0]
            if queue.jobs[0].cost <= queue.deficit:
                return queue.jobs[0]
            queue.deficit += QUANTUM_NBYTES * queue.weight
            self._round.rotate(-1)
        return None

    def pop(self) -> J | None:
        """Take the job whose turn it is."""
        if self.peek() is None:
            return None
        queue = self._round[0]
        job = queue.jobs.popleft()
        queue.deficit -= job.cost
        if not queue.jobs:
            self._round.popleft()
        return job


class TurnPool:
    """Threads that several users share. Any thread may use it."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = Threads(threads, thread_name_prefix=name)
        self._free = threads
        self._lock = threading.Lock()
        self._fair: Fair[_Job] = Fair()

    def user(self, weight: float) -> TurnUser:
        """Return an executor for one user."""
        return TurnUser(self, Queue(weight))

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def add(self, queue: Queue[_Job], job: _Job) -> None:
        with self._lock:
            self._fair.add(queue, job)
        self._go_on()

    def _go_on(self) -> None:
        while True:
            with self._lock:
                job = self._fair.pop() if self._free else None
                if job is None:
                    return
                self._free -= 1
            try:
                self._threads.submit(self._carry_out, job)
            except RuntimeError as error:  # no thread can be started, or the pool is closed
                with self._lock:
                    self._free += 1
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(Unavailable(f"no thread takes work: {error}"))

    def _carry_out(self, job: _Job) -> None:
        try:
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as error:  # it is raised to whoever waits for the job
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)
        finally:
            with self._lock:
                self._free += 1
            self._go_on()


class TurnUser(Executor):
    """One user of a `TurnPool`. weight: its part of the turns while others want them, too."""

    def __init__(self, pool: TurnPool, queue: Queue[_Job]) -> None:
        self._pool = pool
        self._queue = queue

    @property
    def weight(self) -> float:
        return self._queue.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._queue.weight = weight

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        cost = max(JOB_NBYTES_MIN, getattr(fn, "nbytes", 0))
        work = (lambda: fn(*args, **kwargs)) if args or kwargs else fn
        self._pool.add(self._queue, _Job(cost, future, work))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads are others' as well."""
