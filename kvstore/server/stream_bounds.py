"""What byte streams of all clients together may hold, and for how long one may stand still.

gRPC cannot be told to end a stream whose reader does not read: even an error waits behind the bytes
before it. So few are sent at once, in small messages, and each has a deadline, which gRPC keeps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from kvstore.model.errors import InvalidRequest, Unavailable

T = TypeVar("T")

STREAMS_MAX = 48  # of a kind at once; gRPC takes 0.2 MiB for one that is not read
WAITING_MAX = 48
TURN_S = 5.0
STALL_S = 10.0
STREAM_S_MAX = 600.0
COPIED_NBYTES_MAX = 8 << 20  # of records that wait to be sent; or one record, if that is larger


class Turns:
    """Lets at most `STREAMS_MAX` streams of a kind run; a few wait for their turn."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(STREAMS_MAX)
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Have a turn for the time of the context. Raises Unavailable."""
        if self._waiting >= WAITING_MAX:
            raise _too_many()
        self._waiting += 1
        try:
            async with asyncio.timeout(TURN_S):
                await self._free.acquire()
        except TimeoutError as error:
            raise _too_many() from error
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()


class Held:
    """Bytes taken from a `Room`, until `give_back`."""

    def __init__(self, room: Room, nbytes: int) -> None:
        self._room = room
        self._nbytes = nbytes
        self.is_held = True

    def give_back(self) -> None:
        if self.is_held:
            self.is_held = False
            self._room.free(self._nbytes)


class Room:
    """Bytes of memory that are taken in the order in which they were asked for."""

    def __init__(self, nbytes_max: int = COPIED_NBYTES_MAX) -> None:
        self._nbytes_max = self._free = nbytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken_nbytes(self) -> int:
        return self._nbytes_max - self._free

    def bound(self, nbytes_max: int) -> None:
        """Set how many bytes there are. What is taken beyond that is let pass."""
        self._free += nbytes_max - self._nbytes_max
        self._nbytes_max = nbytes_max
        self._hand_out()

    async def take(self, nbytes: int, wait_s: float) -> Held:
        """Take bytes, all there are if that is fewer. Raises Unavailable after `wait_s`."""
        nbytes = min(nbytes, self._nbytes_max)
        if self._waiting or nbytes > self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((nbytes, turn))
            try:
                async with asyncio.timeout(wait_s):
                    await turn
            except BaseException as error:
                self._leave(nbytes, turn)
                if isinstance(error, TimeoutError):
                    raise _too_many() from error
                raise
        else:
            self._free -= nbytes
        return Held(self, nbytes)

    def free(self, nbytes: int) -> None:
        self._free += nbytes
        self._hand_out()

    def _leave(self, nbytes: int, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.free(nbytes)  # it was given what nobody waits for any more
            return
        self._waiting = deque(each for each in self._waiting if each[1] is not turn)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if nbytes > self._free and self.taken_nbytes:  # it may be more than there is now
                return
            self._waiting.popleft()
            if not turn.done():
                self._free -= nbytes
                turn.set_result(None)


def check_deadline(remaining_s: float | None) -> None:
    """Raise InvalidRequest unless a stream ends by itself some time."""
    if remaining_s is None or remaining_s > STREAM_S_MAX:
        raise InvalidRequest(
            f"a Get needs a deadline, of at most {STREAM_S_MAX:.0f} s: set one in the call"
        )


async def in_time(messages: AsyncIterator[T]) -> AsyncGenerator[T]:
    """Yield what a writer sends. Raises Unavailable when nothing comes for `STALL_S`."""
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                message = await anext(messages, None)
        except TimeoutError as error:
            raise Unavailable(
                f"nothing came for {STALL_S:g} s: begin the stream again", reason="slow_stream"
            ) from error
        if message is None:
            return
        yield message


def _too_many() -> Unavailable:
    return Unavailable(
        "too many streams at once, or some that nobody reads: try again", reason="streams"
    )
