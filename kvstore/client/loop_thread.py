"""An event loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvstore.client.async_client import AsyncClient
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.system.scheduling import run_promptly

T = TypeVar("T")
Work = Callable[[AsyncClient], Awaitable[T]]

CLOSE_TIMEOUT_S = 5.0
END_TIMEOUT_S = 15.0  # for calls that wait for a thread: longer than a file is waited for
CLOSED = "this client was closed during the call"


class LoopThread:
    """Runs one AsyncClient. `make` is called on the loop."""

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[concurrent.futures.Future[Any]] = set()  # that have not ended
        self._lock = threading.RLock()  # a finalizer may call while its thread has it
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        self._thread.start()

        async def made() -> AsyncClient:
            return make()

        making = asyncio.run_coroutine_threadsafe(made(), self._loop)
        try:
            self.client = making.result(CLOSE_TIMEOUT_S)
        except BaseException:
            self._closed = True
            self._end()
            raise

    def submit(self, work: Work[T]) -> concurrent.futures.Future[T]:
        """Start `work(client)` on the loop; never blocks. Raises InvalidRequest after `close`. What
        `close` ends raises Unavailable."""

        async def run() -> T:
            try:
                return await work(self.client)
            except asyncio.CancelledError:
                if self._closed:
                    raise Unavailable(CLOSED) from None
                raise

        with self._lock:
            if self._closed:
                raise InvalidRequest("this client is closed")
            call = asyncio.run_coroutine_threadsafe(run(), self._loop)
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def wait(self, work: Work[T]) -> T:
        """Run `work(client)` on the loop and return its result. Raises InvalidRequest after
        `close`."""
        return self.submit(work).result()

    def close(self) -> None:
        """Close the client, and end the thread and what still waits for it. A second call does
        nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self.client.close(), self._loop)
        try:
            closing.result(CLOSE_TIMEOUT_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        run_promptly()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_end_tasks())
            for call in list(self._calls):
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    call.set_exception(Unavailable(CLOSED))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


async def _end_tasks() -> None:
    """Cancel all tasks, and wait for their end: a thread may write to the memory of a caller."""
    until = time.monotonic() + END_TIMEOUT_S
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=left_s)
