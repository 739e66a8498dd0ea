"""The thread that makes all calls of a driver: registers memory, posts reads, sees them end.

Whoever posted a read waits for `PostedRead.over`. The memory that a read writes into is held (a
view of it) until the transport has said that the read is over, whoever has given up on it by then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.peer.onesided.driver import (
    OFFER_NBYTES_MAX,
    Driver,
    DriverError,
    Piece,
    Regions,
    State,
)

logger = logging.getLogger(__name__)

IDLE_S = 1.0  # between two looks, if nothing wakes the thread
JOBS_MAX = 1024  # that wait for the thread
CLOSE_S = 5.0
CALL_S = 5.0
START_S = 30.0
REGISTER_S = 60.0  # pinning takes a second for a few GiB

Job = Callable[[], None]


class PostedRead:
    """A posted read. over: True once every byte is there, False once it has failed; before, the
    transport may write into its targets. `Mover.read` makes it."""

    def __init__(self, targets: Sequence[memoryview]) -> None:
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.targets = targets


class Mover:
    """Runs a driver from `start` to `close`. Its methods are called on the event loop.

    make: returns the driver, in the thread. version: grows with each change of what is offered.
    """

    def __init__(self, name: str, make: Callable[[], Driver]) -> None:
        self.name = name
        self.version = 0
        self._make = make
        self._driver: Driver | None = None
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reads: list[tuple[Any, PostedRead]] = []  # of the thread
        self._memory: Regions[memoryview] = Regions()  # registered; of the event loop
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._ending = False
        self._closed = False

    @property
    def reads(self) -> int:
        """How many are under way."""
        return len(self._reads)

    async def start(self) -> None:
        """Begin. Raises DriverError, and then it is closed."""
        self._loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(begun,), name=f"kvstore-{self.name}", daemon=True
        )
        self._thread.start()
        try:
            async with asyncio.timeout(START_S):
                await begun
        except TimeoutError:
            await self.close()
            raise DriverError(f"{self.name} does not start in {START_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all reads, and let go of all memory."""
        if self._closed:
            return
        self._closed = True
        self._ending = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():
                logger.error("links=%s reason='it does not end'", self.name)
                return  # its memory stays held, and the descriptor open
        os.close(self._wake_fd)
        self._memory = Regions()

    # ---- memory ----------------------------------------------------------------------------------

    async def register(self, memory: memoryview) -> None:
        """Offer memory to peers, and let reads write into it. It stays mapped until `withdraw`.
        Raises DriverError."""
        address = address_of(memory)
        await self._call(lambda driver: driver.register(address, len(memory)), memory, REGISTER_S)
        self._memory.add(address, len(memory), memory)
        self.version += 1

    async def withdraw(self, memory: memoryview) -> None:
        """Offer memory no more. Raises DriverError."""
        address = address_of(memory)
        if self._memory.pop(address) is not None:
            await self._call(lambda driver: driver.withdraw(address), memory, REGISTER_S)
            self.version += 1

    def holds(self, view: memoryview) -> bool:
        """Say whether a view lies in registered memory."""
        return self._memory.find(address_of(view), len(view)) is not None

    async def offer(self) -> tuple[int, bytes]:
        """Return what peers need for reading, and its version. Raises DriverError."""
        version = self.version
        offer = await self._call(lambda driver: driver.offer())
        if len(offer) > OFFER_NBYTES_MAX:
            raise DriverError(f"an offer of {len(offer)} bytes: there is too much memory in pieces")
        return version, offer

    # ---- reads -----------------------------------------------------------------------------------

    async def connect(self, offer: bytes) -> Any:
        """Return a remote. Raises DriverError."""
        return await self._call(lambda driver: driver.connect(offer))

    def disconnect(self, remote: Any) -> None:
        """End a remote, and soon its reads."""

        def job() -> None:
            assert self._driver is not None
            try:
                self._driver.disconnect(remote)
            except DriverError as error:
                logger.warning("links=%s reason=%r", self.name, str(error))

        self._submit(job)

    def read(
        self, remote: Any, sources: Sequence[int], targets: Sequence[memoryview]
    ) -> PostedRead:
        """Begin to read from addresses of a peer into targets. Raises DriverError."""
        reading = PostedRead(targets)
        pieces = [
            Piece(address_of(target), source, len(target))
            for source, target in zip(sources, targets, strict=True)
        ]

        def job() -> None:
            assert self._driver is not None
            try:
                self._reads.append((self._driver.post(remote, pieces), reading))
            except DriverError as error:
                logger.warning("links=%s reason=%r", self.name, str(error))
                self._tell(reading, done=False)

        self._submit(job)
        return reading

    # ---- the thread ------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        if self._ending:
            raise DriverError(f"{self.name} is closed")
        if self._jobs.qsize() >= JOBS_MAX:
            raise DriverError(f"{JOBS_MAX} requests wait for {self.name}")
        self._jobs.put(job)
        os.eventfd_write(self._wake_fd, 1)

    async def _call(
        self,
        work: Callable[[Driver], Any],
        memory: memoryview | None = None,
        timeout_s: float = CALL_S,
    ) -> Any:
        """Have the thread do something; return what it returned. Raises DriverError.

        memory: what it works on, which stays mapped for that time.
        """
        answer: asyncio.Future[Any] = self._loop.create_future()

        def job(held: memoryview | None = memory) -> None:
            assert self._driver is not None
            try:
                result = work(self._driver)
            except Exception as error:
                told = error if isinstance(error, DriverError) else DriverError(repr(error)[:300])
                self._soon(lambda: None if answer.done() else answer.set_exception(told))
            else:
                self._soon(lambda: None if answer.done() else answer.set_result(result))

        self._submit(job)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DriverError(f"{self.name} did not answer in {timeout_s:g} s") from None

    def _soon(self, work: Job) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the event loop has ended: nobody waits
            logger.debug("links=%s told nobody", self.name)

    def _tell(self, reading: PostedRead, *, done: bool) -> None:
        self._soon(lambda: None if reading.over.done() else reading.over.set_result(done))

    def _run(self, begun: asyncio.Future[None]) -> None:
        try:
            self._driver = self._make()
        except Exception as error:
            told = error if isinstance(error, DriverError) else DriverError(repr(error)[:300])
            self._soon(lambda: None if begun.done() else begun.set_exception(told))
            return
        self._soon(lambda: None if begun.done() else begun.set_result(None))
        try:
            while not self._ending:
                self._turn(self._driver)
        except Exception:
            logger.exception("links=%s", self.name)
        finally:
            self._ending = True
            self._end(self._driver)

    def _turn(self, driver: Driver) -> None:
        """Do what is to be done; then sleep until there is more."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        while not self._jobs.empty():
            self._jobs.get()()
        driver.progress()
        left = []
        for read, reading in self._reads:
            state = driver.state(read)
            if state is State.UNDER_WAY:
                left.append((read, reading))
            else:
                self._tell(reading, done=state is State.DONE)
        self._reads = left
        if self._jobs.empty() and not self._ending:
            driver.wait(self._wake_fd, IDLE_S, reading=bool(left))

    def _end(self, driver: Driver) -> None:
        """Close the driver. Reads it does not let end are never told over: their memory stays."""
        try:
            driver.close()
        except Exception:
            logger.exception("links=%s", self.name)
            return
        while not self._jobs.empty():
            self._jobs.get()  # whoever waits is cancelled by the end of the daemon
        for _, reading in self._reads:
            self._tell(reading, done=False)
        self._reads = []


def address_of(view: memoryview) -> int:
    """Return where a view's bytes are; 0 for none."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
