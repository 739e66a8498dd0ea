"""Wait for a thread without ever leaving it behind with the caller's buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from kvstore.errors import Unavailable

T = TypeVar("T")


async def run_blocking(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` in a thread. Cancelled, return only when the thread is done with it.

    A thread cannot be stopped: if the caller went on, it would give a slot to somebody else while
    the read still lands in it. Work that has not begun is taken back at once.
    """
    try:
        job = executor.submit(work)
    except RuntimeError as error:  # what a pool says after its shutdown
        raise Unavailable("the file tier is closed") from error
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        job.cancel()
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue  # raised once, below
        if not future.cancelled():
            future.exception()  # nobody else will look at it
        raise
