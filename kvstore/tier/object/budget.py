"""A bound on bytes in flight. A caller without room waits, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.tier.object.failure import ObjectFailed


class ByteBudget:
    """held_nbytes never exceeds the limit, except for one object that is larger than it."""

    def __init__(self, limit_nbytes: int) -> None:
        self.held_nbytes = 0
        self._limit_nbytes = limit_nbytes
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()

    @asynccontextmanager
    async def take(self, nbytes: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold `nbytes` of it. Raises ObjectFailed if there is no room in time."""
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while self.held_nbytes and self.held_nbytes + nbytes > self._limit_nbytes:
                    self._room.clear()
                    await self._room.wait()
                self.held_nbytes += nbytes
        except TimeoutError as error:
            raise ObjectFailed("too many bytes in flight", reason="busy") from error
        try:
            yield
        finally:
            self.held_nbytes -= nbytes
            self._room.set()
