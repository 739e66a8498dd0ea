"""Puts that wait for room: they look again one at a time, in the order in which they came.

To look is a walk over what cannot leave now. If all looked at each event that may have made room,
they would take the event loop from everybody else. So the pause after a look that found nothing
doubles, up to a bound, until one finds room.
"""

from __future__ import annotations

import asyncio

PAUSE_MIN_S = 0.002
PAUSE_MAX_S = 0.064


class Waiting:
    """One that waits. nbytes: what it wants."""

    def __init__(self, room: Room, nbytes: int) -> None:
        self.nbytes = nbytes
        self.turn: asyncio.Future[None] | None = None  # while it does not look
        self._room = room

    async def look_again(self, wait_s: float) -> None:
        """Return when it is this one's turn to look; after `wait_s` in any case."""
        self.turn = asyncio.get_running_loop().create_future()
        self._room.found_none(self)
        try:
            await asyncio.wait([self.turn], timeout=wait_s)
        finally:
            self.turn = None

    def leave(self) -> None:
        """Wait no more."""
        self._room.left(self)


class Room:
    """changed: set by each event that may have made room, for those who look at little."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._waiting: dict[Waiting, None] = {}  # in order
        self._looks: Waiting | None = None
        self._again = False  # something has changed since it began to look
        self._none_nbytes: int | None = None  # for so much there was no room since then
        self._pause_s = 0.0
        self._next_at = 0.0  # of the event loop's time
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, nbytes: int) -> Waiting:
        """Return one more that waits, until it leaves."""
        waiting = Waiting(self, nbytes)
        self._waiting[waiting] = None
        return waiting

    def set(self) -> None:
        """Say that there may be room."""
        self.changed.set()
        if not self._waiting:
            return
        self._again = True
        if self._looks is None:
            self._begin()

    def found_none(self, waiting: Waiting) -> None:
        """Let another one look, if there may be room for it."""
        if waiting is not self._looks:
            return
        self._looks = None
        least = waiting.nbytes if self._none_nbytes is None else self._none_nbytes
        self._none_nbytes = min(least, waiting.nbytes)
        self._pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, 2 * self._pause_s))
        self._next_at = asyncio.get_running_loop().time() + self._pause_s
        self._next()
        if self._looks is None and self._again:
            self._begin()

    def left(self, waiting: Waiting) -> None:
        """Let the next one look: there may be more room than this one needed."""
        self._waiting.pop(waiting, None)
        if waiting is self._looks:
            self._looks = None
            self._pause_s = self._next_at = 0.0
            self._next()
            if self._looks is None and self._again:
                self._begin()

    def _begin(self) -> None:
        """Let the first one look, after the pause."""
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._next_at:
            self._timer = loop.call_at(self._next_at, self._due)
        else:
            self._due()

    def _due(self) -> None:
        self._timer = None
        if self._looks is None:
            self._again, self._none_nbytes = False, None
            self._next()

    def _next(self) -> None:
        for each in self._waiting:
            tried = self._none_nbytes is not None and each.nbytes >= self._none_nbytes
            if each.turn is not None and not each.turn.done() and not tried:
                self._looks = each
                each.turn.set_result(None)
                return
