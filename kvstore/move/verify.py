"""Verifies what readers report as corrupt, and drops only what is wrong.

A report is a claim: the reader's own copy may be what was wrong, and any client may lie. So each
report costs the daemon reads of its own, and these are bounded for all clients together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstore.decide.index import HeldSlot, StoredBlock, StoredPart
from kvstore.decide.planner import Planner
from kvstore.metrics import Metrics
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.model.pair import belongs
from kvstore.move.write_behind import WriteBehind

logger = logging.getLogger(__name__)

NBYTES_PER_S = 256 << 20
BURST_NBYTES = 1 << 30  # as much as a window of a client, several times over
REPORTS_MAX = 16  # being judged, or waiting
REPORT_S = 3.0  # less than clients wait for an answer


class Verifier:
    """One for a node. Judges a block at a time; reports take turns."""

    def __init__(
        self,
        planner: Planner,
        write_behind: WriteBehind,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._write_behind = write_behind
        self._metrics = metrics
        self._now = now
        self._turn = asyncio.Lock()
        self._reports = 0
        self._paid_until = float("-inf")  # on the clock; ahead of it, the rate is used up

    async def drop_wrong(self, blocks: Sequence[StoredBlock | None]) -> int:
        """Verify every copy of `blocks` on this node and drop the wrong ones; None: not stored.

        Returns of how many blocks something was dropped. Raises Unavailable when there are too many
        reports, or a disk does not answer; what was found until then is dropped.
        """
        judged = dropped = 0
        try:
            if self._reports >= REPORTS_MAX:
                raise Unavailable(f"{REPORTS_MAX} reports are being judged", reason="reports")
            self._reports += 1
            try:
                async with asyncio.timeout(REPORT_S):
                    for block in blocks:
                        dropped += await self._judge_next(block)
                        judged += 1
            except TimeoutError as error:
                raise Unavailable(
                    f"{judged} of {len(blocks)} reported blocks were verified in {REPORT_S:g} s: "
                    "report the others again",
                    reason="reports",
                ) from error
            finally:
                self._reports -= 1
        finally:
            if judged < len(blocks):
                self._metrics.reported_blocks.labels("unverified").inc(len(blocks) - judged)
        return dropped

    async def _judge_next(self, block: StoredBlock | None) -> bool:
        if block is None:
            self._metrics.reported_blocks.labels("unknown").inc()
            return False
        async with self._turn:
            await asyncio.sleep(max(0.0, self._paid_until - self._now()))
            wrong = await self._verifier(block)
        self._metrics.reported_blocks.labels("dropped" if wrong else "kept").inc()
        if wrong:
            self._metrics.corrupt_blocks.labels("reader").inc()
            logger.warning("blocks=corrupt noticed=reader key=%s", block.key[:4].hex())
        else:
            logger.info("report=unfounded key=%s", block.key[:4].hex())
        return wrong

    async def _verifier(self, block: StoredBlock) -> bool:
        wrong = False
        for record in block.records:
            held = record.resident
            if held is not None and not await self._is_good(record.checksum, held):
                self._planner.checks.resident_is_wrong(block, record, held)
                wrong = True
            elif held is not None and self._is_unpaired(block, record, held):
                self._planner.checks.is_unpaired(block, record)
                wrong = True
            check = self._planner.checks.of(block, record)
            if check is None:
                continue
            bad: Sequence[int] = ()
            try:
                bad = await self._write_behind.reads.check(check)
            except KVStoreError as error:
                self._metrics.read_errors.inc()
                raise Unavailable(f"a reported block cannot be read: {error}") from error
            finally:
                self._planner.checks.done(check, bad)
            self._pay(check.nbytes)
            if bad:
                self._write_behind.wake()  # what the arena has of it is written anew
                wrong = True
        return wrong

    def _is_unpaired(self, block: StoredBlock, record: StoredPart, held: HeldSlot) -> bool:
        """Say whether a fine part was made with another base than the one beside it."""
        if not record.fine or record.resident is not held:
            return False
        base = self._planner.checks.base_of(block, record)
        return not belongs(self._write_behind.reads.view(held), base)

    async def _is_good(self, checksum: int, held: HeldSlot) -> bool:
        with self._planner.pinned([held]):
            self._pay(held.nbytes)
            return await self._write_behind.reads.matches(held, checksum)

    def _pay(self, nbytes: int) -> None:
        earliest = self._now() - BURST_NBYTES / NBYTES_PER_S
        self._paid_until = max(self._paid_until, earliest) + nbytes / NBYTES_PER_S
