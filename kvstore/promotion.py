"""Bringing records up into the arena, for those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing

from kvstore.block import BlockKey, NamespaceId, Span
from kvstore.mover import Mover
from kvstore.planner import Planner

PROMOTE_ROUNDS_MAX = 3


class Promotion:
    """Plans reads and waits for them; several may wait for one read."""

    def __init__(self, planner: Planner, mover: Mover, now: Callable[[], float]) -> None:
        self._planner = planner
        self._mover = mover
        self._now = now

    async def bring_up(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        deadline: float,
    ) -> int:
        """Bring `spans` into the arena, as far as that goes until the deadline.

        Returns how many of their records were stored, but not there at first.
        """
        absent = 0
        for attempt in range(PROMOTE_ROUNDS_MAX):
            records = [r for r in self._planner.find(namespace_id, keys, spans) if r is not None]
            missing = [record for record in records if record.resident is None]
            absent = absent if attempt else len(missing)
            if not missing:
                break
            # What is up already must not make room for what comes up.
            with self._planner.pinned([r.resident for r in records if r.resident is not None]):
                with closing(self._planner.plan_reads(namespace_id, keys, spans)) as reads:
                    for read in reads:
                        self._mover.start_read(read)
                        await asyncio.sleep(0)  # it goes to the disk now; others' turn, too
                pending = self._mover.reads_of(missing)
                timeout_s = deadline - self._now()
                if not pending or timeout_s <= 0:
                    break
                await asyncio.wait(pending, timeout=timeout_s)
        return absent
