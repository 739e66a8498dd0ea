"""The buffer that records pass through, shared with one pool process, in lanes of equal size.

A lane under a call that has not been seen to end is not used again: it comes back when the process
has answered, and never if the process is ended instead, for the next one gets memory of its own.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from contextlib import suppress

from kvstore.tier.pool.failure import PoolFailed

LANES = 4
PUT_LANES = 1  # of these, so that gets never wait for puts
WAITING_MAX = 256


class Lane:
    """One piece of the buffer, for one call at a time. offset: of it in the buffer."""

    def __init__(self, view: memoryview, offset: int, *, puts: bool) -> None:
        self.view = view
        self.offset = offset
        self.puts = puts


class Memory:
    """A memfd, mapped here and in the process. Whoever uses a lane's view keeps the mapping."""

    def __init__(self, nbytes: int) -> None:
        step = lane_nbytes(nbytes)
        self.nbytes = LANES * step
        self.descriptor = os.memfd_create("kvstore-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            view = memoryview(mmap.mmap(self.descriptor, self.nbytes))
        except BaseException:
            os.close(self.descriptor)
            raise
        self._free = [
            Lane(view[at * step : (at + 1) * step], at * step, puts=at < PUT_LANES)
            for at in range(LANES)
        ]
        self._waiting: deque[tuple[bool, asyncio.Future[Lane]]] = deque()

    async def take(self, timeout_s: float, *, puts: bool) -> Lane:
        """Return a free lane. Raises PoolFailed if none is in time, or the memory is out of use."""
        found = next((lane for lane in self._free if lane.puts == puts), None)
        if found is not None:
            self._free.remove(found)
            return found
        if len(self._waiting) >= WAITING_MAX:
            raise PoolFailed("too many wait for a lane of the pool", reason="busy")
        waiter: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        waiting = (puts, waiter)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            with suppress(ValueError):  # `give` or `retire` may have taken it out
                self._waiting.remove(waiting)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give(waiter.result())  # it came at the very end
            if isinstance(error, TimeoutError):
                raise PoolFailed("no lane of the pool was free in time", reason="busy") from error
            raise

    def give(self, lane: Lane) -> None:
        """Take a lane back, or pass it on."""
        for waiting in self._waiting:
            puts, waiter = waiting
            if puts == lane.puts and not waiter.done():
                self._waiting.remove(waiting)
                waiter.set_result(lane)
                return
        self._free.append(lane)

    def retire(self) -> None:
        """Let nobody wait for a lane any more: the process is over."""
        while self._waiting:
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(PoolFailed("its process has ended", reason="gone"))

    def sent(self) -> None:
        """Close the descriptor, once the process has it."""
        os.close(self.descriptor)


def lane_nbytes(buffer_bytes: int) -> int:
    """Return what passes at once, at most."""
    return buffer_bytes // (LANES * mmap.PAGESIZE) * mmap.PAGESIZE
