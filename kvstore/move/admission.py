"""Offers the file tier what the arena alone has, however many blocks there are."""

from __future__ import annotations

import asyncio

from kvstore.decide.planner import Planner
from kvstore.system.steps import in_steps


async def offer_all(planner: Planner, timeout_s: float) -> bool:
    """Queue what the arena alone has, what failed before included. False: the write budget keeps
    some of it out, or there is no more time."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await in_steps(planner.writes.retry_failed())
            return not await in_steps(planner.admission.offer_all())
    except TimeoutError:
        return False
