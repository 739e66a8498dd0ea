"""Saves behind an engine's back: one thread and a bounded queue, and who owns them.

For engines that are called by a program (`generate`, a completion) and whose saves read memory of
their own. vLLM's device blocks are overwritten by its next steps: its connector has a thread that
knows them.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvstore.client.blocking import Client
from kvstore.model.errors import KVStoreError

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0

Job = TypeVar("Job")


class SaveThread(ABC, Generic[Job]):
    """Does jobs one after another. A save is optional: none raises, and the next is tried anyway.

    dropped: jobs that were not done, or not wholly: too many were queued, or the daemon was away,
    full or slow. saved_blocks: records that were stored; whoever saves counts them.
    """

    def __init__(
        self, client: Client, *, jobs_max: int, enter: Callable[[], None] | None = None
    ) -> None:
        """jobs_max: queued at once, with the one that is being done. enter: what the thread calls
        first."""
        self.dropped = 0
        self.saved_blocks = 0
        self._client = client
        self._jobs_max = jobs_max
        self._pending = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "kvstore-save", enter or _nothing)

    @property
    def takes_jobs(self) -> bool:
        """Whether a job is of any use now."""
        return bool(self._client.available)

    def put(self, job: Job) -> None:
        """Queue a job, or drop it. Never blocks."""
        with self._changed:
            taken = self._pending < self._jobs_max and self.takes_jobs and not self._closed
            if taken:
                self._pending += 1
                self._thread.submit(self._run, job)
            else:
                self.dropped += 1
        if not taken:
            self.let_go(job)

    def drain(self, wait_s: float) -> bool:
        """Wait until nothing is queued; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, wait_s)

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Finish what is queued within `wait_s`, then stop the thread."""
        self.drain(wait_s)
        with self._changed:
            self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    def save(self, job: Job) -> bool:
        """Store what a job is about; False if the daemon had no room for all of it.

        Called in the thread. Whatever it raises is a job that was dropped.
        """

    def let_go(self, job: Job) -> None:  # most jobs hold nothing
        """Take back what a job holds. Called once for each, done or dropped."""

    def _run(self, job: Job) -> None:
        done = False
        try:
            done = self.save(job)
        except KVStoreError as error:
            logger.info("save=dropped error=%r", error)
        except Exception:  # a save is optional, and this thread is the only one there is
            logger.exception("save=dropped")
        finally:
            self.let_go(job)
            with self._changed:
                self.dropped += not done
                self._pending -= 1
                self._changed.notify_all()


class SavesBehind(ABC):
    """An engine's cache that saves behind its back: how it is asked about that, flushed and closed.

    It is its own context manager.
    """

    @property
    @abstractmethod
    def _saves(self) -> SaveThread[Any]:
        """The thread that saves."""

    @property
    @abstractmethod
    def _daemon(self) -> Client:
        """The client by which it does."""

    @abstractmethod
    def close(self) -> None:
        """Finish the queued saves, for 2 s at most, and end the session."""

    @property
    def saved_blocks(self) -> int:
        """Records that this object has stored."""
        return self._saves.saved_blocks

    @property
    def saves_dropped(self) -> int:
        """Saves dropped, wholly or in part, because the daemon was away, full or slow."""
        return self._saves.dropped

    def flush(self, wait_s: float = 30.0) -> bool:
        """Wait until all saves are durable; False if they are not after `wait_s`.

        Raises Unavailable if the daemon is away.
        """
        deadline = time.monotonic() + wait_s
        if not self._saves.drain(wait_s):
            return False
        return self._daemon.admin.flush(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _nothing() -> None:
    """What a thread without a device has to do first."""
