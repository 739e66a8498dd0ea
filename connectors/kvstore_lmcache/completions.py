"""What has ended, and the descriptor that says so: how LMCache's native clients report."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

Completion = tuple[int, bool, str, list[bool] | None]
"""Number of the task, whether it succeeded, why not, and the outcome of each key."""


class Completions:
    """Filled by any thread, emptied by LMCache's."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ended: list[Completion] = []
        self._closed = False

    def add(self, number: int, ok: bool, error: str, done: Sequence[bool]) -> None:
        """Report a task; nobody reads it after `close`."""
        with self._lock:
            if not self._closed:
                self._ended.append((number, ok, error, list(done)))
                os.eventfd_write(self.fd, 1)

    def drain(self) -> list[Completion]:
        """Return what has ended since the last call."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.fd)
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
