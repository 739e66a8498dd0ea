"""The arena keeps the contract of every tier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.model.block import Slot
from kvstore.testing.tier import TierContract
from kvstore.tier import Tier
from kvstore.tier.dram import Arena


class TestArena(TierContract[Slot]):
    @asynccontextmanager
    async def opened(self, directory: Path, capacity_bytes: int) -> AsyncIterator[Tier[Slot]]:
        arena = Arena(capacity_bytes, capacity_bytes)
        await arena.start()
        yield arena
        await arena.close()
