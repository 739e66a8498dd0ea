"""Keep a background task running through its bugs: nobody sees the error of a lost task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
AGAIN_S_MAX = 60.0


async def keep_running(
    name: str, work: Callable[[], Awaitable[None]], failed: Callable[[str], None]
) -> None:
    """Run `work` until it returns, or this is cancelled. Whatever else it raises is logged, told
    to `failed` by `name`, and it begins anew after a pause.

    The pause doubles with every error, and is short again once `work` has run for longer than the
    longest pause.
    """
    loop = asyncio.get_running_loop()
    again_s = AGAIN_S
    while True:
        began = loop.time()
        try:
            return await work()
        except Exception:
            failed(name)
            if loop.time() - began > AGAIN_S_MAX:
                again_s = AGAIN_S
            logger.exception("task=failed name=%s again_s=%.0f", name, again_s)
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, AGAIN_S_MAX)


def next_beat(period_s: float) -> float:
    """Return when the loop's clock is next at a multiple of a period. Tasks of many tenants that
    wait for the same beat are woken together: each for itself would find cold caches."""
    now = asyncio.get_running_loop().time()
    return (now // period_s + 1) * period_s
