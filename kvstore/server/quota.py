"""How many calls of one tenant are answered at once, by whatever way they come, and how many of
them begin in one round of the event loop.

The loop would begin all calls that have come before it looks at the next one that comes. So where
several tenants ask, each begins a few, by the bytes of its requests, and the others of it wait for
the next round (deficit round robin): a call of another tenant waits for one round, not for all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import NamedTuple

from kvstore.model.errors import Unavailable

ROUND_NBYTES = 16 << 10  # of requests that the tenant of the largest weight begins in a round
CALL_NBYTES = 1 << 10  # what a call costs beside its bytes
# It makes room: a tenant over its part could not give back what it holds, if it were refused.
_MAKES_ROOM = "Release"


class _Waiting(NamedTuple):
    turn: asyncio.Future[None]
    cost: int


class CallTurns:
    """The rounds, for all tenants of a daemon. There are none while no call waits or has begun."""

    def __init__(self) -> None:
        self._active: dict[Quota, None] = {}
        self._scheduled = False

    def note(self, quota: Quota) -> None:
        """Look at a tenant in the next round."""
        self._active[quota] = None
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._scheduled = False
        for quota in list(self._active):
            if not quota.next_round():
                del self._active[quota]
        if self._active:
            self._schedule()


class Quota:
    """The calls of one tenant. calls_max: at once; 0: as many as come. round_nbytes: what may begin
    in a round."""

    def __init__(self, turns: CallTurns) -> None:
        self.calls_max = 0
        self.running = 0
        self.round_nbytes = ROUND_NBYTES
        self._turns = turns
        self._left = ROUND_NBYTES  # of this round; less than nothing after a large request
        self._waiting: deque[_Waiting] = deque()

    def place(self, method: str) -> _Place:
        """Return a context for one call. To enter it raises Unavailable if the tenant has its
        part already."""
        return _Place(self, method)

    def is_due(self, method: str) -> bool:
        """Say whether a call may begin now."""
        return method == _MAKES_ROOM or (self._left > 0 and not self._waiting)

    def begins(self, method: str, nbytes: int) -> bool:
        """Take the turn of a call whose request has `nbytes`; False: it has to await `turn`."""
        if not self.is_due(method):
            return False
        self._left -= CALL_NBYTES + nbytes
        self._turns.note(self)
        return True

    async def turn(self, nbytes: int) -> None:
        """Wait for the turn of a call that did not begin. The places bound how many wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(turn, CALL_NBYTES + nbytes))
        self._turns.note(self)
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


class _Place:
    """Not a generator: it is entered for each hot call."""

    __slots__ = ("_method", "_quota")

    def __init__(self, quota: Quota, method: str) -> None:
        self._quota = quota
        self._method = method

    def __enter__(self) -> None:
        quota = self._quota
        if 0 < quota.calls_max <= quota.running and self._method != _MAKES_ROOM:
            raise Unavailable(
                f"{quota.calls_max} calls of this tenant are being answered", reason="quota"
            )
        quota.running += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._quota.running -= 1
