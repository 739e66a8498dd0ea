"""Arena to pool: what was used again is put there, in the background, once it is durable here.

What was used once is most of what is stored, and never asked for again. So a block is noted when a
request hits it, and put when its turn has come, if it is still in the arena then: nothing is
promoted for it, and one batch at a time is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.decide.index import StoredBlock
from kvstore.decide.planner import Planner
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.move.deletions import Deletions
from kvstore.move.pool_graves import PoolGraves
from kvstore.tier.dram import Arena
from kvstore.tier.pool import PoolFailed, PoolRecord, PoolTier, PoolWrite

logger = logging.getLogger(__name__)

TICK_S = 0.2
QUEUE_MAX = 1 << 16  # blocks
KNOWN_MAX = 1 << 18  # blocks of which it is known that the pool had them
KNOWN_S = 60.0  # for how long: a pool evicts what it likes
DURABLE_S = 60.0  # for a block to become durable; some never do
LOOKED_AT = 512  # blocks of the queue for one batch
FULL_PAUSE_S = 5.0  # after a put for which there was no room
WAIT_S = 2.0
PUT_S = 5.0


class Noted(NamedTuple):
    """A block that was used. since: then."""

    namespace_id: NamespaceId
    since: float


class PoolSink:
    """has_file: blocks become durable on this node before they are put."""

    def __init__(
        self,
        tier: PoolTier,
        graves: PoolGraves,
        planner: Planner,
        arena: Arena,
        *,
        deletions: Deletions,
        metrics: Metrics,
        has_file: bool,
        now: Callable[[], float],
    ) -> None:
        self.put_records = 0
        self._tier = tier
        self._graves = graves
        self._planner = planner
        self._arena = arena
        self._deletions = deletions
        self._metrics = metrics
        self._has_file = has_file
        self._now = now
        self._queue: OrderedDict[BlockKey, Noted] = OrderedDict()
        self._known: OrderedDict[BlockKey, float] = OrderedDict()  # -> until when
        self._doubtful: set[str] = set()  # puts of which it is not known how they ended
        self._trips = 0  # of the tier, when `_known` was begun
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    @property
    def waiting(self) -> int:
        """Blocks that may be put."""
        return len(self._queue)

    def used(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Note that a request has hit blocks: that is their second use at least."""
        if not self._tier.up:
            return
        if self._trips != self._tier.trips:  # it was away, and may have come back empty
            self._trips = self._tier.trips
            self._known.clear()
        now = self._now()
        for key in keys:
            if key in self._queue or self._known.get(key, 0.0) > now:
                continue
            if len(self._queue) >= QUEUE_MAX:
                self._refuse("queue")
                continue
            self._queue[key] = Noted(namespace_id, now)

    async def run(self) -> None:
        """Put until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            while self._queue and await self.put_some():
                pass

    async def put_some(self) -> bool:
        """Put one batch; say whether there may be more to put now."""
        ready = self._tier.up and self._graves.loaded
        if not ready or self._now() < self._not_before:
            return False
        async with self._turn:
            try:
                if self._doubtful:
                    await self._tier.remove(list(self._doubtful), self._now() + WAIT_S)
                    self._doubtful.clear()
                batch = self._batch()
                return bool(batch) and await self._put(batch)
            except PoolFailed as error:
                logger.info("pool=not_put reason=%r", str(error))
                return False

    async def settled(self, deadline: float) -> bool:
        """Wait until no put is under way; say whether that is so in time."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._now())), self._turn:
                return True
        except TimeoutError:
            return False

    def doubtful(self, prefix: str) -> list[str]:
        """Return the names that begin so of which it is not known whether the pool has them."""
        return [name for name in self._doubtful if name.startswith(prefix)]

    def forget(self, keys: Sequence[BlockKey] | None) -> None:
        """Take note that blocks, or (None) all, are not in the pool any more."""
        for key in list(self._known) if keys is None else keys:
            self._known.pop(key, None)
            self._queue.pop(key, None)

    def _refuse(self, reason: str, records: int = 1) -> None:
        self._metrics.pool_refused_records.labels(reason).inc(records)

    def _batch(self) -> list[StoredBlock]:
        """Take blocks of one namespace off the queue that fit one call; what is not durable yet
        goes to its end."""
        batch: list[StoredBlock] = []
        left = self._tier.nbytes_max + PAGE_NBYTES
        for key, noted in list(islice(self._queue.items(), LOOKED_AT)):
            block = self._planner.index.get(noted.namespace_id, key)
            reason = self._unfit(block, noted)
            if reason == "":
                assert block is not None
                nbytes = self._nbytes(block)
                if nbytes > left or (batch and block.namespace_id != batch[0].namespace_id):
                    break
                batch.append(block)
                left -= nbytes
            elif reason == "waits":
                self._queue.move_to_end(key)
                continue
            else:
                self._refuse(reason, len(block.records) if block is not None else 1)
            del self._queue[key]
        return batch

    def _unfit(self, block: StoredBlock | None, noted: Noted) -> str:
        """Say why a block is not put now: "" if it is, "waits" if it may be later."""
        if block is None:
            return "evicted"
        records = [record for record in block.records if not record.fine]
        if self._has_file and any(record.frame is None for record in records):
            return "waits" if self._now() - noted.since < DURABLE_S else "not_durable"
        if any(record.resident is None for record in records):
            return "evicted"
        return "large" if self._nbytes(block) > self._tier.nbytes_max + PAGE_NBYTES else ""

    def _nbytes(self, block: StoredBlock) -> int:
        return sum(PAGE_NBYTES + record.nbytes for record in block.records if not record.fine)

    async def _put(self, batch: Sequence[StoredBlock]) -> bool:
        """Put what of a batch the pool has not; say whether to go on."""
        namespace_id, keys = batch[0].namespace_id, [block.key for block in batch]
        with self._deletions.watch(namespace_id, keys) as watch:
            writes = self._writes(batch)
            try:
                names = [write.record.name for write in writes]
                there = await self._tier.exists(names, self._now() + WAIT_S)
            except PoolFailed as error:
                self._refuse(error.reason, len(writes))
                raise
            live = [block for block in batch if block.key not in watch.dead]
            held = [record.resident for block in live for record in block.records]
            slots = [slot for slot in held if slot is not None]
            absent = {
                write.record.name
                for write, is_there in zip(writes, there, strict=True)
                if not is_there
            }
            with self._planner.pinned(slots):
                # As they are now: the arena may have evicted some while the pool was asked.
                wanted = [w for w in self._writes(live) if w.record.name in absent]
                done = await self._put_records(wanted) if wanted else True
        until = self._now() + KNOWN_S
        for block in live if done else ():
            self._known[block.key] = until
            self._known.move_to_end(block.key)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return done

    def _writes(self, blocks: Sequence[StoredBlock]) -> list[PoolWrite]:
        """Return the records of blocks that are in the arena now."""
        return [
            PoolWrite(
                PoolRecord(block.namespace_id, record.part, block.key, record.nbytes),
                self._arena.view(record.resident.slot),
                record.checksum,
                block.block_index,
                block.parent,
                self._graves.stamp(block.namespace_id, block.key),
            )
            for block in blocks
            for record in block.records
            if record.resident is not None and not record.fine
        ]

    async def _put_records(self, writes: Sequence[PoolWrite]) -> bool:
        """Put records; say whether to go on. A delete waits until this has ended, then removes."""
        try:
            result = await self._tier.put(writes, self._now() + PUT_S)
        except PoolFailed as error:
            self._doubtful.update(write.record.name for write in writes)
            self._refuse(error.reason, len(writes))
            raise
        except asyncio.CancelledError:
            self._doubtful.update(write.record.name for write in writes)
            raise
        self.put_records += len(result.done)
        self._doubtful.update(write.record.name for write in result.failed)
        self._refuse("gone", len(result.failed))
        self._refuse("full", result.full)
        self._refuse("corrupt", result.corrupt)
        if result.full:
            self._not_before = self._now() + FULL_PAUSE_S
        return not result.full
