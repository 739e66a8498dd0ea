"""Wait for what a thread does. It cannot be stopped: whoever goes on while it still runs gives away
buffers that it writes into.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from typing import Any


async def ended(jobs: Collection[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """Wait until all have ended, or the time is over."""
    if jobs:
        await asyncio.wait(jobs, timeout=timeout_s)


async def outlive(jobs: Collection[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """The same, however often the caller is cancelled meanwhile.

    For callers that have been cancelled, or are about to raise: what cancels them here is not told.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while left := [job for job in jobs if not job.done()]:
        left_s = None if until is None else until - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(left, timeout=left_s)
