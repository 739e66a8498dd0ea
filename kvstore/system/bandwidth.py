"""How many bytes a second a user may move, and whose turn it is where several users move some."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvstore.model.errors import Unavailable
from kvstore.system.rounds import RoundUser
from kvstore.system.turns import Fair, Queue

BURST_S = 0.25  # of a rate: what may be moved at once by who has moved nothing for a while
WAIT_S_MAX = 10.0


class TokenBucket:
    """Bytes a second, 0 for as many as come, with a bounded burst. Times are the caller's."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._level = bytes_per_s * BURST_S
        self._at: float | None = None

    def wait_s(self, now: float) -> float:
        """Return how long to wait before something more is moved."""
        if not self.bytes_per_s:
            return 0.0
        before = now if self._at is None else self._at
        self._at = max(now, before)
        grown = self._level + self.bytes_per_s * (self._at - before)
        self._level = min(self.bytes_per_s * BURST_S, grown)
        return max(0.0, -self._level / self.bytes_per_s)

    def take(self, nbytes: int) -> None:
        """Count what is moved. It may be more than there is: the next ones wait for that."""
        if self.bytes_per_s:
            self._level -= nbytes


class OverQuota(Unavailable):
    """Waiting for a turn would take too long. Nothing was begun."""


class Lane:
    """What one user moves over one thing. Lives on the event loop.

    rounds: its part of the event loop, where that moves the bytes itself.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        rounds: RoundUser | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = TokenBucket(bytes_per_s)
        self._rounds = rounds
        self._now = now

    def set_rate(self, bytes_per_s: int) -> None:
        if bytes_per_s != self._bucket.bytes_per_s:
            self._bucket = TokenBucket(bytes_per_s)

    async def take(self, nbytes: int, wait_s_max: float = WAIT_S_MAX) -> None:
        """Wait until `nbytes` may be moved. Raises Unavailable at once if that is too long."""
        wait_s = self._bucket.wait_s(self._now())
        if wait_s > wait_s_max:
            raise OverQuota("this tenant has used its bandwidth", reason="quota")
        self._bucket.take(nbytes)
        if wait_s:
            await asyncio.sleep(wait_s)
        if self._rounds is not None and not self._rounds.begins(nbytes):
            await self._rounds.turn(nbytes)


@dataclass(slots=True)
class _Transfer:
    cost: int
    turn: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Channel:
    """Bytes that several users may have under way together, in turns by their weights."""

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._held_nbytes = 0
        self._fair: Fair[_Transfer] = Fair()

    @asynccontextmanager
    async def moving(self, queue: Queue[_Transfer], nbytes: int) -> AsyncIterator[None]:
        """Have `nbytes` under way for the time of the context; the caller bounds the wait."""
        transfer = _Transfer(nbytes)
        self._fair.add(queue, transfer)
        self._go_on()
        try:
            await transfer.turn
            yield
        finally:
            if transfer.turn.done() and not transfer.turn.cancelled():
                self._held_nbytes -= nbytes
            self._go_on()

    def _go_on(self) -> None:
        while (first := self._fair.peek()) is not None:
            if not first.turn.done():
                if self._held_nbytes and self._held_nbytes + first.cost > self._nbytes_max:
                    return
                self._held_nbytes += first.cost
                first.turn.set_result(None)
            self._fair.pop()


class ChannelLane(Lane):
    """What one user moves over a channel that others use, too."""

    def __init__(self, channel: Channel, weight: float, bytes_per_s: int = 0) -> None:
        super().__init__(bytes_per_s)
        self._channel = channel
        self.queue: Queue[_Transfer] = Queue(weight)

    @asynccontextmanager
    async def moving(self, nbytes: int, wait_s_max: float) -> AsyncIterator[None]:
        """Move `nbytes` within the context. Raises Unavailable, TimeoutError."""
        async with asyncio.timeout(wait_s_max) as limit:
            await self.take(nbytes, wait_s_max)
            async with self._channel.moving(self.queue, nbytes):
                limit.reschedule(None)
                yield
