"""Offers the file tier what the arena alone has, however many blocks there are."""

from __future__ import annotations

import asyncio

from kvstore.decide.planner import Planner
from kvstore.system.steps import in_steps

OFFER_S = 1.0  # at least, however little time there is to write: whoever has none asks what is due


async def offer_all(planner: Planner, timeout_s: float) -> bool:
    """Queue what the arena alone has, what failed before included. False: the write budget keeps
    some of it out, or there is no more time."""
    try:
        async with asyncio.timeout(max(OFFER_S, timeout_s)):
            await in_steps(planner.writes.retry_failed())
            return not await in_steps(planner.admission.offer_all())
    except TimeoutError:
        return False
