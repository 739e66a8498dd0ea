"""Loads whose slots are leased while they are still read into: the asker copies the first records
while the disk reads the last.

Blocks are told of in prefix order. A record that could not be read, or was found wrong, ends it:
what comes behind it makes no prefix. So does the end of the race against recomputing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.decide.index import HeldSlot, StoredPart
from kvstore.model.outcome import Ready
from kvstore.move.file_reads import Reads
from kvstore.move.load_race import Ended


class Coming(NamedTuple):
    """A record on its way. block: its index in the prefix."""

    block: int
    record: StoredPart
    slot: HeldSlot


class Filling:
    """Records on their way into slots that a lease holds.

    coming: in prefix order. blocks: of the whole hit. ended: how the load went, once that is known.
    """

    def __init__(
        self, coming: Sequence[Coming], blocks: int, reads: Reads, ended: asyncio.Task[Ended]
    ) -> None:
        self._coming = coming
        self._blocks = blocks
        self._reads = reads
        self._ended = ended
        self._came = 0

    @property
    def ready_blocks(self) -> int:
        """How many blocks of the hit are there."""
        while self._came < len(self._coming):
            block, record, slot = self._coming[self._came]
            if record.resident is not slot:
                return block
            self._came += 1
        return self._blocks

    async def reach(self, blocks: int) -> Ready:
        """Wait until so many blocks are there, or will not be. That lasts no longer than the load
        may."""
        blocks = min(blocks, self._blocks)
        while (ready := self.ready_blocks) < blocks:
            _, record, slot = self._coming[self._came]
            ended = self._ended
            given_up = ended.done() and not ended.cancelled() and ended.result() is not Ended.DONE
            if given_up or ended.cancelled() or record.loading is not slot:
                return Ready(ready, over=True, given_up=given_up)
            waited_for: set[asyncio.Task[Ended] | asyncio.Task[None]] = {
                *self._reads.of([record]),
                self._ended,
            }
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        return Ready(ready, over=False)
