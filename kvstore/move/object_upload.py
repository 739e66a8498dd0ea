"""Arena to object tier: what was written behind is uploaded too, run by run, in the background.

A prefix that grows is noted by its last block. Once it has rested, the runs before it
that are not in the bucket yet, whoever stored them, are promoted, copied and written as one
object each. The last run of a prefix may be short; when it has grown, it is written once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import groupby

from kvstore.decide.index import StoredBlock
from kvstore.decide.planner import Planner, Write
from kvstore.format.codec import Codec, encode_run
from kvstore.format.frame import FrameHeader, RunBlock
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, InvalidRequest, Unavailable
from kvstore.move.deletions import Deletions
from kvstore.move.promote import Promotion
from kvstore.move.run_encoding import run_header
from kvstore.tier.dram import Arena
from kvstore.tier.file import aligned_copy
from kvstore.tier.object import ObjectRefused, ObjectTier, run_blocks

logger = logging.getLogger(__name__)

REST_S = 5.0  # a prefix that was added to so lately is likely to be added to again
TICK_S = 0.5
RETRY_S = 30.0
TIPS_MAX = 1 << 16
UPLOADED_MAX = 1 << 18
FRAME_BLOCKS_MAX = 16
RUNS_AT_ONCE = 4  # of a prefix: a connection and a copy in memory each
WAIT_S = 10.0
WRITE_S = 120.0

Frame = tuple[FrameHeader, list[memoryview]]


class ObjectUpload:
    """One task beside the store's."""

    def __init__(
        self,
        tier: ObjectTier,
        planner: Planner,
        promotion: Promotion,
        arena: Arena,
        *,
        watches: Deletions,
        metrics: Metrics,
        executor: Executor,
        codec: Codec,
        now: Callable[[], float],
        fine: bool = False,
        rest_s: float = REST_S,
    ) -> None:
        """fine: fine parts are uploaded, too."""
        self._fine = fine
        self._deletions = watches
        self._tier = tier
        self._planner = planner
        self._promotion = promotion
        self._arena = arena
        self._metrics = metrics
        self._executor = executor
        self._codec = codec
        self._now = now
        self._rest_s = rest_s
        self._tips: OrderedDict[BlockKey, float] = OrderedDict()  # -> when to look at it
        self._uploaded: OrderedDict[BlockKey, None] = OrderedDict()  # last blocks of whole runs

    @property
    def waiting(self) -> int:
        """Prefixes with blocks that may not be in the bucket yet."""
        return len(self._tips)

    def note(self, write: Write) -> None:
        """Note that a run of blocks is durable on this node."""
        self._tips.pop(write.blocks[0].parent or write.blocks[0].key, None)
        self._look_at(write.blocks[-1].key, self._now() + self._rest_s)

    async def run(self) -> None:
        """Upload until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.upload(self._now())

    async def upload(self, until: float) -> None:
        """Upload the prefixes that have rested at `until`. Ends with the first that the store
        refuses: it would refuse the others as well."""
        due = [key for key, at in self._tips.items() if at <= until]
        for key in due:
            self._tips.pop(key, None)
            block = self._planner.index.by_key(key)
            if block is None or self._planner.index.namespaces.spec(block.namespace_id) is None:
                continue
            try:
                await self._upload_all(self._missing_runs(block))
            except asyncio.CancelledError:  # a drain goes on with it
                self._look_at(key, self._now())
                raise
            except Unavailable as error:
                logger.warning("upload=failed key=%s reason=%r", key[:4].hex(), str(error))
                self._look_at(key, self._now() + RETRY_S)
                if isinstance(error, ObjectRefused):
                    return
            except (CorruptBlock, InvalidRequest) as error:  # no better the next time
                logger.warning("upload=dropped key=%s reason=%r", key[:4].hex(), str(error))
            except Exception:  # a bug: the others are uploaded all the same
                logger.exception("upload=bug key=%s", key[:4].hex())

    def _look_at(self, key: BlockKey, at: float) -> None:
        self._tips[key] = at
        self._tips.move_to_end(key)
        if len(self._tips) > TIPS_MAX:
            self._tips.popitem(last=False)
            self._metrics.object_refused_writes.labels("queue").inc()

    def _missing_runs(self, tip: StoredBlock) -> list[list[StoredBlock]]:
        """Return the runs up to `tip` that were not uploaded, in prefix order."""
        aligned = run_blocks(self._planner.namespace(tip.namespace_id))
        runs: list[list[StoredBlock]] = []
        run: list[StoredBlock] = []
        block: StoredBlock | None = tip
        while block is not None and not (not run and block.key in self._uploaded):
            run.append(block)
            above = self._planner.index.by_key(block.parent) if block.parent else None
            if above is not None and above.block_index != block.block_index - 1:
                above = None  # what a client said of parents may even be a circle
            if block.block_index % aligned == 0:  # else what is before it is gone, or not ours
                runs.append(run[::-1])
                run = []
            block = above
        return runs[::-1]

    async def _upload_all(self, runs: Sequence[Sequence[StoredBlock]]) -> None:
        places = asyncio.Semaphore(RUNS_AT_ONCE)

        async def one(run: Sequence[StoredBlock]) -> None:
            async with places:
                await self._upload(run)

        results = await asyncio.gather(*map(one, runs), return_exceptions=True)
        for failed in filter(None, results):
            raise failed

    async def _upload(self, run: Sequence[StoredBlock]) -> None:
        namespace_id, keys = run[0].namespace_id, [block.key for block in run]
        with self._deletions.watch(namespace_id, keys) as watch:
            if not await self._is_there(run):
                frames = await self._frames_of(run)
                if watch.dead:  # from here on, a delete waits for what is being written
                    raise Unavailable("some of it was deleted meanwhile")
                if not frames:
                    return  # evicted meanwhile
                await self._tier.writes.write(frames, self._now() + WRITE_S)
        if len(run) == run_blocks(self._planner.namespace(namespace_id)):
            self._uploaded[keys[-1]] = None
            if len(self._uploaded) > UPLOADED_MAX:
                self._uploaded.popitem(last=False)

    async def _is_there(self, run: Sequence[StoredBlock]) -> bool:
        """Say whether the bucket has all of it: it came from there, or another node was faster."""
        found = await self._tier.lookups.find(
            run[0].namespace_id,
            [block.key for block in run],
            run_blocks=run_blocks(self._planner.namespace(run[0].namespace_id)),
            deadline=self._now() + WAIT_S,
        )
        there = {
            (frame.header.part, frame.header.blocks[at].key)
            for frame in found.frames
            for at in frame.live
        }
        return all((part, block.key) in there for block in run for part in self._parts(block))

    def _parts(self, block: StoredBlock) -> Iterator[Part]:
        """Yield what is uploaded of a block."""
        return (record.part for record in block.records if self._fine or not record.fine)

    async def _frames_of(self, run: Sequence[StoredBlock]) -> list[Frame]:
        namespace_id, keys = run[0].namespace_id, [block.key for block in run]
        parts = sorted({part for block in run for part in self._parts(block)})
        spans = tuple(Span(part, 0, len(run)) for part in parts)
        await self._promotion.promote(namespace_id, keys, spans, self._now() + WAIT_S)
        records = self._planner.find(namespace_id, keys, spans)
        held = [record.resident if record is not None else None for record in records]
        views = [self._arena.view(slot.slot) if slot is not None else None for slot in held]
        checksums = [record.checksum if record is not None else 0 for record in records]
        with self._planner.pinned([slot for slot in held if slot is not None]):
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, self._frames, run, parts, views, checksums
            )

    def _frames(
        self,
        run: Sequence[StoredBlock],
        parts: Sequence[Part],
        views: Sequence[memoryview | None],
        checksums: Sequence[int],
    ) -> list[Frame]:
        """Verify, encode and copy a run: nothing of it is looked at in the arena after this."""
        frames = []
        for number, part in enumerate(parts):
            first = number * len(run)
            for begin, end in _pieces(views[first : first + len(run)]):
                frames.append(
                    self._frame(
                        run[begin:end],
                        part,
                        [view for view in views[first + begin : first + end] if view is not None],
                        checksums[first + begin : first + end],
                    )
                )
        return frames

    def _frame(
        self,
        blocks: Sequence[StoredBlock],
        part: Part,
        raws: list[memoryview],
        checksums: Sequence[int],
    ) -> Frame:
        if list(map(checksum, raws)) != list(checksums):
            raise CorruptBlock("a record in the arena does not match its checksum")
        codec, stored = encode_run(self._codec, raws)
        described = [
            RunBlock(block.key, len(raw), len(buffer), value, checksum(buffer))
            for block, raw, buffer, value in zip(blocks, raws, stored, checksums, strict=True)
        ]
        header = run_header(blocks[0], part, codec, described, sequence=1)
        return header, [aligned_copy(buffer) for buffer in stored]


def _pieces(views: Sequence[memoryview | None]) -> Iterator[tuple[int, int]]:
    """Yield where a frame begins and ends: consecutive records that are there, not too many."""
    begin = 0
    for there, group in groupby(view is not None for view in views):
        end = begin + len(list(group))
        if there:
            for first in range(begin, end, FRAME_BLOCKS_MAX):
                yield first, min(first + FRAME_BLOCKS_MAX, end)
        begin = end
