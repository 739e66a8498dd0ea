"""Ends calls whose credential is not valid any more, however long they would have run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from kvstore.model.errors import Unauthorized

REVOKED = "revoked"  # the reason under which such ends are counted


class Running:
    """A call that ends when its credential does: a context, entered by the task that answers it.
    It raises Unauthorized when the credential ends. sending: it waits for its reader."""

    __slots__ = ("_among", "revoked", "sending", "still_valid", "task")

    def __init__(self, among: set[Running], still_valid: Callable[[], bool]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._among = among
        self.task: asyncio.Task[object] = task
        self.still_valid = still_valid
        self.sending = False
        self.revoked = False

    def __enter__(self) -> Running:
        self._among.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._among.discard(self)
        if self.revoked and isinstance(error, asyncio.CancelledError):
            self.task.uncancel()
            self.check()

    def check(self) -> None:
        """Raise Unauthorized if the credential was revoked while the call was sending."""
        if self.revoked:
            raise Unauthorized("the credential of this call is not valid any more", reason=REVOKED)


class Revocation:
    """All running calls that were let in by a credential."""

    def __init__(self) -> None:
        self._running: set[Running] = set()

    def watched(self, still_valid: Callable[[], bool]) -> Running:
        """Return a context for the current task's call."""
        return Running(self._running, still_valid)

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
