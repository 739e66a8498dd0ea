"""Saves of blocks that an engine overwrites: one thread, a bounded queue, and a fence.

The engine may hand a device block to another request while a copy out of it is queued. So every
step passes a *fence* with the blocks it may overwrite: copies that read one of them get a moment to
finish, and are given up otherwise. A save given up is never committed; what was copied is garbage
that nobody sees. Nothing else here can delay the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from kvstore.client.blocking import Client
from kvstore.model.errors import InvalidRequest, KVStoreError

logger = logging.getLogger(__name__)

STALL_S = 1.0
"""How long fences stop waiting at all after one waited in vain: a hung daemon costs little."""


class Counts(Protocol):
    """An engine's counters, `saves_dropped_down`, `_queue` and `_reuse` and `reuse_wait_seconds`
    among them. Any thread may add."""

    def add(self, **counts: float) -> None: ...


class FencedJob:
    """A save on its way. blocks: the device blocks that are still to be read. dropped: given up.

    Both change under the lock of the saves, and `dropped` before everything is read.
    """

    __slots__ = ("blocks", "dropped")

    def __init__(self, blocks: set[int]) -> None:
        self.blocks = blocks
        self.dropped = False


Job = TypeVar("Job", bound=FencedJob)


class FencedSaves(ABC, Generic[Job]):
    """Owns the save thread of one worker. `queue`, `fence` and `give_up` belong to the engine's
    thread; `save` and what it calls, to the other one."""

    def __init__(
        self, client: Client, counters: Counts, *, jobs_max: int, reuse_wait_s: float
    ) -> None:
        """Start the thread: whoever inherits is complete by now. jobs_max: those that still read.
        reuse_wait_s: how long a fence may wait."""
        self.reuse_wait_s = reuse_wait_s
        self._client = client
        self._counters = counters
        self._jobs_max = jobs_max
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._reading: list[Job] = []  # queued or being copied: the fence must know them
        self._busy = False
        self._closing = False
        self._stalled_until = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    @abstractmethod
    def save(self, job: Job) -> None:
        """Store what a job is about, in the thread. What it raises is a job that was dropped."""

    def enter_thread(self) -> None:  # most threads need nothing
        """What the thread does first."""

    def queue(self, make: Callable[[], Job]) -> None:
        """Queue a job, or drop it unmade. Never blocks."""
        if not self._client.available:
            self._counters.add(saves_dropped_down=1)
            return
        with self._changed:
            if len(self._reading) >= self._jobs_max or self._closing:
                self._counters.add(saves_dropped_queue=1)
                return
            job = make()
            self._reading.append(job)
            self._queue.append(job)
            self._changed.notify_all()

    def fence(self, handed_out: Iterable[int]) -> None:
        """Return when no copy reads one of the blocks `handed_out`: at most reuse_wait_s."""
        reused = set(handed_out)
        with self._changed:
            if not self._late(reused):
                return
            started = time.monotonic()
            if started >= self._stalled_until and not self._changed.wait_for(
                lambda: not self._late(reused), self.reuse_wait_s
            ):
                self._stalled_until = time.monotonic() + STALL_S
            for job in self._late(reused):
                job.dropped = True
                self._reading.remove(job)
                self._counters.add(saves_dropped_reuse=1)
            self._counters.add(reuse_wait_seconds=time.monotonic() - started)

    def give_up(self, wait_s: float) -> bool:
        """Drop every save whose blocks are still to be copied; return when no block is read. False
        if that took longer than `wait_s`."""
        with self._changed:
            for job in self._reading:
                job.dropped = True
                self._counters.add(saves_dropped_reuse=1)
            self._reading.clear()
        return self.drain(wait_s)

    def drain(self, wait_s: float) -> bool:
        """Wait until nothing is queued or being committed; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, wait_s)

    def close(self, wait_s: float) -> None:
        """Finish what is queued within `wait_s`, then stop the thread."""
        self.drain(wait_s)
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(wait_s)

    def all_read(self, job: Job) -> bool:
        """Let go of the blocks of a job, all of which were copied. False: it was given up before,
        and what was copied may be anything."""
        with self._changed:
            if job.dropped:
                return False
            self._reading.remove(job)
            self._changed.notify_all()
            return True

    def reads_only(self, job: Job, blocks: set[int]) -> bool:
        """Let go of all other blocks of a job. False: it was given up before."""
        with self._changed:
            if job.dropped:
                return False
            job.blocks = blocks
            self._changed.notify_all()
            return True

    def _late(self, reused: set[int]) -> list[Job]:
        """Return the jobs that still read one of these device blocks."""
        return [job for job in self._reading if not reused.isdisjoint(job.blocks)]

    def _run(self) -> None:
        try:
            self.enter_thread()
        except Exception:  # if it cannot copy, it fails, and reports it
            logger.exception("save=unbound")
        while (job := self._next()) is not None:
            try:
                if not job.dropped:
                    self.save(job)
            except KVStoreError as error:
                level = logging.WARNING if isinstance(error, InvalidRequest) else logging.DEBUG
                logger.log(level, "save=dropped error=%r", error)
                self._counters.add(saves_dropped_down=1)
            except Exception:
                # A save is optional and this thread is the only one there is: it must survive.
                logger.exception("save=dropped")
                self._counters.add(saves_dropped_down=1)
            finally:
                self._finish(job)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.popleft()

    def _finish(self, job: Job) -> None:
        with self._changed:
            if job in self._reading:
                self._reading.remove(job)
            self._busy = False
            self._changed.notify_all()
