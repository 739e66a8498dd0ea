"""Ends calls whose credential is not valid any more, however long they would have run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.model.errors import Unauthorized

REVOKED = "revoked"  # the reason under which such ends are counted


class Running:
    """A call that ends when its credential does. sending: it waits for its reader."""

    __slots__ = ("revoked", "sending", "still_valid", "task")

    def __init__(self, task: asyncio.Task[object], still_valid: Callable[[], bool]) -> None:
        self.task = task
        self.still_valid = still_valid
        self.sending = False
        self.revoked = False

    def check(self) -> None:
        """Raise Unauthorized if the credential was revoked while the call was sending."""
        if self.revoked:
            raise Unauthorized("the credential of this call is not valid any more", reason=REVOKED)


class Revocation:
    """All running calls that were let in by a credential."""

    def __init__(self) -> None:
        self._running: set[Running] = set()

    @contextmanager
    def watched(self, still_valid: Callable[[], bool]) -> Iterator[Running]:
        """Run the current task's call inside. Raises Unauthorized when the credential ends."""
        task = asyncio.current_task()
        assert task is not None
        running = Running(task, still_valid)
        self._running.add(running)
        try:
            yield running
        except asyncio.CancelledError:
            if not running.revoked:
                raise
            task.uncancel()
            running.check()
        finally:
            self._running.discard(running)

    def sweep(self) -> int:
        """Ask every running call's credential again; return how many calls were ended."""
        ended = 0
        for running in self._running:
            if running.revoked or running.still_valid():
                continue
            running.revoked = True
            ended += 1
            # What waits for its reader is inside of gRPC, which would answer in its own words.
            if not running.sending:
                running.task.cancel()
        return ended
