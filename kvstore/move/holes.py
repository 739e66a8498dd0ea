"""Notices holes that a client has punched into the arena, and drops the records that were there.

Where holes cannot be forbidden (see `extent_memory`), a client of the same user can turn pages into
zeros. Whoever reads such a record finds its checksum wrong, so nothing wrong is ever used. Here the
pages are taken back, before a write finds no memory, and the wrong records of the extent are
dropped, before readers find them one by one. All of them are verified: whoever touched a hole, a
write to disk among them, has filled it since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstore.decide.index import HeldSlot, StoredBlock, StoredPart
from kvstore.decide.planner import Planner
from kvstore.metrics import Metrics
from kvstore.model.errors import KVStoreError
from kvstore.move.write_behind import WriteBehind
from kvstore.tier.dram import Arena

logger = logging.getLogger(__name__)

LOOK_S = 0.5
WRITTEN_LATELY_S = 30.0
PAUSES = 4  # as long as a round took: whoever punches for ever has a fifth of the loop's time
STEP_BLOCKS = 256


class Holes:
    """One task beside the store's."""

    def __init__(
        self,
        planner: Planner,
        write_behind: WriteBehind,
        arena: Arena,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._write_behind = write_behind
        self._arena = arena
        self._metrics = metrics
        self._now = now
        self._told: set[int] = set()  # extents that the log has named

    async def run(self) -> None:
        """Look until cancelled."""
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            began = self._now()
            await self.look()
            pause_s = max(LOOK_S, PAUSES * (self._now() - began))

    async def look(self) -> None:
        """Fill the holes there are, and drop what was in them."""
        for extent, missing_nbytes in self._arena.holes.punched():
            self._tell(extent, missing_nbytes)
            try:
                await self._arena.holes.refill(extent)
            except OSError as error:
                logger.warning("arena=not_refilled extent=%d reason=%r", extent, error.strerror)
                continue
            await self._drop_wrong(extent)

    def _tell(self, extent: int, missing_nbytes: int) -> None:
        self._metrics.punched_bytes.inc(missing_nbytes)
        if extent not in self._told:
            self._told.add(extent)
            logger.warning(
                "arena=punched extent=%d bytes=%d: a client gives the arena's memory back to the "
                "system; what it held there is dropped, further holes are only counted",
                extent,
                missing_nbytes,
            )

    async def _drop_wrong(self, extent: int) -> None:
        dropped = 0
        index = self._planner.index
        for keys in index.walks.steps(most=STEP_BLOCKS):
            await asyncio.sleep(0)
            for block in map(index.by_key, keys):
                for record in block.records if block is not None else ():
                    held = record.resident
                    if block is not None and held is not None and held.slot.extent == extent:
                        dropped += await self._drop_if_wrong(block, record, held)
        if dropped:
            self._metrics.corrupt_blocks.labels("arena").inc(dropped)

    async def _drop_if_wrong(self, block: StoredBlock, record: StoredPart, held: HeldSlot) -> bool:
        with self._planner.pinned([held]):
            if await self._write_behind.reads.matches(held, record.checksum):
                return False
            await self._check_written_lately(block, record)
            self._planner.checks.resident_is_wrong(block, record, held)
        return True

    async def _check_written_lately(self, block: StoredBlock, record: StoredPart) -> None:
        """Verify a frame that may have been written from the hole, after its bytes were verified
        in the arena."""
        check = self._planner.checks.of(block, record, WRITTEN_LATELY_S)
        if check is None:
            return
        bad: Sequence[int] = ()
        try:
            bad = await self._write_behind.reads.check(check)
        except KVStoreError as error:
            logger.warning("holes=frame_unverified reason=%r", str(error))
        finally:
            self._planner.checks.done(check, bad)
