"""An event loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvstore.client.async_client import AsyncClient
from kvstore.model.errors import InvalidRequest
from kvstore.system.scheduling import run_promptly

T = TypeVar("T")
Work = Callable[[AsyncClient], Awaitable[T]]

CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    """Runs one AsyncClient. `make` is called on the loop."""

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        self._thread.start()
        self._closed = False

        async def made() -> AsyncClient:
            return make()

        self.client = asyncio.run_coroutine_threadsafe(made(), self._loop).result(CLOSE_TIMEOUT_S)

    def submit(self, work: Work[T]) -> concurrent.futures.Future[T]:
        """Start `work(client)` on the loop; never blocks. Raises InvalidRequest after `close`."""
        if self._closed:
            raise InvalidRequest("this client is closed")

        async def run() -> T:
            return await work(self.client)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def wait(self, work: Work[T]) -> T:
        """Run `work(client)` on the loop and return its result. Raises InvalidRequest after
        `close`."""
        return self.submit(work).result()

    def close(self) -> None:
        """Close the client, and end the thread. A second call does nothing."""
        if self._closed:
            return
        closing = self.submit(lambda client: client.close())
        self._closed = True
        try:
            closing.result(CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        run_promptly()
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
