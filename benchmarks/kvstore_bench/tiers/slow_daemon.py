"""`kvstore serve` with one tier slowed: every read and write there takes FACTOR times as long.

    python -m kvstore_bench.tiers.slow_daemon file|object FACTOR serve --set ...

What is slow is the device, as the store sees it; the store itself runs as it always does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.cli import main
from kvstore.tier.file import RealDisk
from kvstore.tier.object.bucket import ObstoreBucket


def slow_down(tier: str, factor: float) -> None:
    """Slow the disks or buckets that this process will open."""
    if tier == "file":
        for name in ("preadv", "pwritev", "fdatasync"):
            setattr(RealDisk, name, slower(getattr(RealDisk, name), factor))
    elif tier == "object":
        for name in ("head", "get", "put"):
            setattr(ObstoreBucket, name, slower_task(getattr(ObstoreBucket, name), factor))
    else:
        raise SystemExit(f"{tier}: slow down file or object")


def slower(call: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return a call that returns or raises the same, `factor` times as late."""

    def wrapper(*args: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*args)
        finally:
            time.sleep((factor - 1) * (time.monotonic() - began))

    return wrapper


def slower_task(
    call: Callable[..., Awaitable[Any]], factor: float
) -> Callable[..., Awaitable[Any]]:
    """Do the same to a coroutine function."""

    async def wrapper(*args: Any) -> Any:
        began = time.monotonic()
        try:
            return await call(*args)
        finally:
            await asyncio.sleep((factor - 1) * (time.monotonic() - began))

    return wrapper


if __name__ == "__main__":
    slow_down(sys.argv[1], float(sys.argv[2]))
    del sys.argv[1:3]
    main()
