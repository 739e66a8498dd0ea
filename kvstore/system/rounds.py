"""Rounds of the event loop: where several users have work for it, each does a part of its own in a
round, by bytes (deficit round robin).

The loop would do all that is ready before it looks at what comes next. So the work of a user with
much of it waits for the next round, and that of another user for one round, not for all of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple


class _Waiting(NamedTuple):
    turn: asyncio.Future[None]
    cost: int


class Rounds:
    """The rounds of all users. There are none while nobody has begun anything, and nobody waits."""

    def __init__(self) -> None:
        self._active: dict[RoundUser, None] = {}
        self._scheduled = False

    def note(self, user: RoundUser) -> None:
        """Look at a user in the next round."""
        self._active[user] = None
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._scheduled = False
        for user in list(self._active):
            if not user.next_round():
                del self._active[user]
        if self._active:
            self._schedule()


class RoundUser:
    """One user. round_nbytes: what it may do in a round."""

    def __init__(self, rounds: Rounds, round_nbytes: int) -> None:
        self.round_nbytes = round_nbytes
        self._rounds = rounds
        self._left = round_nbytes  # of this round; less than nothing after a large work
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_due(self) -> bool:
        """Whether a work may begin now."""
        return self._left > 0 and not self._waiting

    def begins(self, cost: int) -> bool:
        """Take the turn of a work that costs so many bytes; False: it has to await `turn`."""
        if not self.is_due:
            return False
        self._left -= cost
        self._rounds.note(self)
        return True

    async def turn(self, cost: int) -> None:
        """Wait for the turn of a work that did not begin. Its user bounds how many wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(turn, cost))
        self._rounds.note(self)
        await turn

    def next_round(self) -> bool:
        """Let those begin whose turn it is. False: none waits, and nothing is owed."""
        self._left = min(self.round_nbytes, self._left + self.round_nbytes)
        while self._waiting and self._left > 0:
            turn, cost = self._waiting.popleft()
            if not turn.done():  # else its caller has gone
                self._left -= cost
                turn.set_result(None)
        return bool(self._waiting) or self._left < self.round_nbytes
