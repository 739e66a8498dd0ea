"""Arena to object tier: what was written behind is uploaded too, run by run, in the background.

A prefix that grows is noted by its last block. Once it has rested, the runs before it
that are not in the bucket yet, whoever stored them, are promoted, copied and written as one
object each. The last run of a prefix may be short; when it has grown, it is written once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import Executor
from itertools import groupby
from typing import NamedTuple

from kvstore.decide.index import StoredBlock
from kvstore.decide.planner import Planner, Write
from kvstore.format.codec import Codec, encode_run
from kvstore.format.frame import FrameHeader, RunBlock
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, InvalidRequest, Unavailable
from kvstore.move.deletions import Deletions
from kvstore.move.promote import Promotion
from kvstore.move.run_encoding import run_header
from kvstore.move.uploaded import Uploaded
from kvstore.tier.dram import Arena
from kvstore.tier.file import aligned_copy
from kvstore.tier.object import ObjectRefused, ObjectTier, run_blocks

logger = logging.getLogger(__name__)

REST_S = 5.0  # a prefix that was added to so lately is likely to be added to again
TICK_S = 0.5
RETRY_S = 30.0
TIPS_MAX = 1 << 16
TRIES_MAX = 4  # of a prefix of which a run does not come up whole: the arena may be too small
FRAME_BLOCKS_MAX = 16
RUNS_AT_ONCE = 4  # of a prefix: a connection and a copy in memory each
WAIT_S = 10.0
WRITE_S = 120.0

Frame = tuple[FrameHeader, list[memoryview]]


class NotResident(Unavailable):
    """Not all of a run is in the arena."""


class Tip(NamedTuple):
    """The last block of a prefix. at: when to look at it. tries: after which not all came up."""

    at: float
    tries: int = 0


class Missing(NamedTuple):
    """Runs of a prefix to look at. since: when the bucket was seen to have what is before them;
    None: this node does not know what is before them."""

    runs: list[list[StoredBlock]]
    since: float | None


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
        self._tips: OrderedDict[BlockKey, Tip] = OrderedDict()
        self._uploaded = Uploaded(now)

    @property
    def waiting(self) -> int:
        """Prefixes with blocks that may not be in the bucket yet."""
        return len(self._tips)

    def note(self, write: Write) -> None:
        """Note that a run of blocks is durable on this node."""
        self._tips.pop(write.blocks[0].parent or write.blocks[0].key, None)
        rested_at = self._now() + self._rest_s
        settled_at = self._uploaded.settled_at(write.namespace_id)
        self._look_at(write.blocks[-1].key, Tip(max(rested_at, settled_at)))

    def forget(self, namespaces: Collection[NamespaceId]) -> None:
        """Look up again what was uploaded of namespaces: some is deleted."""
        self._uploaded.forget(namespaces)

    async def run(self) -> None:
        """Upload until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.upload(self._now())

    async def upload(self, until: float) -> None:
        """Upload the prefixes that have rested at `until`. Ends with the first that the store
        refuses: it would refuse the others as well."""
        due = [key for key, tip in self._tips.items() if tip.at <= until]
        for key in due:
            tries = self._tips.pop(key, Tip(until)).tries
            block = self._planner.index.by_key(key)
            if block is None or self._planner.index.namespaces.spec(block.namespace_id) is None:
                continue
            try:
                # What has not come up while others did may find room alone.
                await self._upload_all(self._missing(block), 1 if tries else RUNS_AT_ONCE)
            except asyncio.CancelledError:  # a drain goes on with it
                self._look_at(key, Tip(self._now(), tries))
                raise
            except NotResident as error:
                self._try_again(key, tries + 1, error)
            except Unavailable as error:
                self._try_again(key, tries, error)
                if isinstance(error, ObjectRefused):
                    return
            except (CorruptBlock, InvalidRequest) as error:  # no better the next time
                logger.warning("upload=dropped key=%s reason=%r", key[:4].hex(), str(error))
            except Exception:  # a bug: the others are uploaded all the same
                logger.exception("upload=bug key=%s", key[:4].hex())

    def _try_again(self, key: BlockKey, tries: int, error: Unavailable) -> None:
        """Look at a prefix later, unless too often not all of it has come up."""
        over = tries >= TRIES_MAX
        result = "dropped" if over else "failed"
        logger.warning("upload=%s key=%s reason=%r", result, key[:4].hex(), str(error))
        if over:
            self._metrics.object_refused_writes.labels("dram").inc()
        else:
            self._look_at(key, Tip(self._now() + RETRY_S, tries))

    def _look_at(self, key: BlockKey, tip: Tip) -> None:
        self._tips[key] = tip
        self._tips.move_to_end(key)
        if len(self._tips) > TIPS_MAX:
            self._tips.popitem(last=False)
            self._metrics.object_refused_writes.labels("queue").inc()

    def _missing(self, tip: StoredBlock) -> Missing:
        """Return the runs up to `tip` that the bucket is not known to have, in prefix order."""
        aligned = run_blocks(self._planner.namespace(tip.namespace_id))
        since: float | None = self._now()
        runs: list[list[StoredBlock]] = []
        run: list[StoredBlock] = []
        block: StoredBlock | None = tip
        while block is not None:
            seen = self._uploaded.since(tip.namespace_id, block.key) if not run else None
            if seen is not None:
                return Missing(runs[::-1], seen)
            run.append(block)
            above = self._planner.index.by_key(block.parent) if block.parent else None
            if above is not None and above.block_index != block.block_index - 1:
                above = None  # what a client said of parents may even be a circle
            if above is None and block.block_index:
                since = None
            if block.block_index % aligned == 0:  # else what is before it is gone, or not ours
                runs.append(run[::-1])
                run = []
            block = above
        return Missing(runs[::-1], since)

    async def _upload_all(self, missing: Missing, at_once: int) -> None:
        places = asyncio.Semaphore(at_once)

        async def one(run: Sequence[StoredBlock]) -> bool:
            async with places:
                return await self._upload(run)

        results = await asyncio.gather(*map(one, missing.runs), return_exceptions=True)
        since = missing.since
        for run, result in zip(missing.runs, results, strict=True):
            if isinstance(result, BaseException):
                raise result  # the runs behind it are looked at again with it
            whole = len(run) == run_blocks(self._planner.namespace(run[0].namespace_id))
            since = since if result else None
            if whole and since is not None:
                self._uploaded.note(run[-1].key, since)

    async def _upload(self, run: Sequence[StoredBlock]) -> bool:
        """Upload a run that the bucket lacks. False: it has left this node. Raises Unavailable if
        not all of it can be read, or written, now."""
        namespace_id, keys = run[0].namespace_id, [block.key for block in run]
        with self._deletions.watch(namespace_id, keys) as watch:
            wanted = self._wanted(namespace_id, keys)
            if not any(wanted):
                return False
            if not all(wanted):
                raise NotResident("some of it left meanwhile")
            if not await self._is_there(namespace_id, keys, wanted):
                frames = await self._frames_of(run, wanted)
                if watch.dead:  # from here on, a delete waits for what is being written
                    raise Unavailable("some of it was deleted meanwhile")
                await self._tier.writes.write(frames, self._now() + WRITE_S)
            if watch.dead:
                raise Unavailable("some of it was deleted meanwhile")
        return True

    async def _is_there(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], wanted: Sequence[Set[Part]]
    ) -> bool:
        """Say whether the bucket has all of it: it came from there, or another node was faster."""
        found = await self._tier.lookups.find(
            namespace_id,
            keys,
            run_blocks=run_blocks(self._planner.namespace(namespace_id)),
            deadline=self._now() + WAIT_S,
        )
        there = {
            (frame.header.part, frame.header.blocks[at].key)
            for frame in found.frames
            for at in frame.live
        }
        return all(
            (part, key) in there for key, parts in zip(keys, wanted, strict=True) for part in parts
        )

    def _wanted(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> list[Set[Part]]:
        """Return what is to be uploaded of each block, of what is stored of it at this moment."""
        blocks = [self._planner.index.get(namespace_id, key) for key in keys]
        return [set(self._parts(block)) if block is not None else set() for block in blocks]

    def _parts(self, block: StoredBlock) -> Iterator[Part]:
        """Yield what is uploaded of a block."""
        return (record.part for record in block.records if self._fine or not record.fine)

    async def _frames_of(
        self, run: Sequence[StoredBlock], wanted: Sequence[Set[Part]]
    ) -> list[Frame]:
        """Promote and encode all that is wanted of a run. Raises Unavailable if less came up."""
        namespace_id, keys = run[0].namespace_id, [block.key for block in run]
        parts = sorted(set().union(*wanted))
        spans = tuple(Span(part, 0, len(run)) for part in parts)
        await self._promotion.promote(namespace_id, keys, spans, self._now() + WAIT_S)
        records = self._planner.find(namespace_id, keys, spans)
        held = [record.resident if record is not None else None for record in records]
        needed = [part in block for part in parts for block in wanted]
        if any(need and slot is None for need, slot in zip(needed, held, strict=True)):
            raise NotResident("not all of it came up: no room in the arena, a slow or failing disk")
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
