"""Memory of tenants that are deleted: their clients may keep it mapped, and touch it again."""

from __future__ import annotations

import asyncio

from kvstore.metrics import Metrics
from kvstore.tier.dram import Arena

LOOK_S = 0.5  # as often as a store looks after what its own arena has given back


class LeftArenas:
    """Retired arenas, watched until nobody has touched them for a while. metrics: the
    daemon's, because those of their tenants are gone."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arenas: list[Arena] = []

    async def take(self, arena: Arena) -> None:
        """Own an arena from now on. It is retired if it was not: its store may have failed."""
        await arena.retire()
        self._arenas.append(arena)

    async def run(self) -> None:
        """Give back what clients touch, until it is cancelled; then close all."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                for arena in list(self._arenas):
                    await self._look(arena)
        finally:
            arenas, self._arenas = self._arenas, []
            for arena in arenas:
                await arena.close()

    async def _look(self, arena: Arena) -> None:
        self._metrics.touched_again_bytes.inc(await arena.holes.renew())
        if not arena.is_watched:
            self._arenas.remove(arena)
            await arena.close()
