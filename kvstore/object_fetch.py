"""Object tier to arena: what a prefix lacks is written into the store as any writer would.

So records that come from a bucket are dirty, and written behind to the file tier, like all others;
neither the index nor the policies know of the bucket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.answers import Ask
from kvstore.block import (
    PAGE_NBYTES,
    BlockKey,
    Grant,
    Match,
    Namespace,
    NamespaceId,
    Part,
    Slot,
    Span,
    padded,
)
from kvstore.checksum import checksum
from kvstore.codec import decodes_to
from kvstore.errors import KVStoreError
from kvstore.frame import RunBlock
from kvstore.loads import Ended, Loads
from kvstore.obs import Metrics
from kvstore.planner import DAEMON_SESSION, Planner, SessionId, longest_hit, needed_spans
from kvstore.tier.object import FoundFrame, ObjectRead, ObjectTier, Outcome, run_blocks

logger = logging.getLogger(__name__)

WINDOW_NBYTES = 16 << 20  # of records published at once: the first are up while the last are asked
WINDOWS_MAX = 8  # on their way at once; beyond that they queue in prefix order
LEASE_MARGIN = 0.8  # of a lease's time, to read into its slots


class Writer(Protocol):
    """The part of the store that takes records in."""

    async def reserve(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        first_block: int,
        parent: BlockKey | None,
        spans: tuple[Span, ...],
    ) -> Grant: ...

    async def commit(
        self, session: SessionId, lease_id: int, checksums: Sequence[int]
    ) -> object: ...

    def release(self, session: SessionId, lease_ids: Sequence[int]) -> list[bool]: ...

    async def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int: ...

    def view(self, slot: Slot) -> memoryview: ...


_Record = tuple[BlockKey, Part]


class _Place(NamedTuple):
    """Where in the bucket a record is."""

    frame: FoundFrame
    position: int

    @property
    def block(self) -> RunBlock:
        return self.frame.header.blocks[self.position]

    @property
    def begin(self) -> int:
        before = self.frame.header.blocks[: self.position]
        return PAGE_NBYTES + sum(padded(block.stored_nbytes) for block in before)


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive blocks of a prefix, the parts of them a hit needs, and what of it is to come."""

    namespace_id: NamespaceId
    first: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    spans: tuple[Span, ...]
    nbytes: int = field(compare=False)


class ObjectFetch:
    """Looks for prefixes in the bucket and brings them up. `store`: set before the first call."""

    store: Writer

    def __init__(
        self,
        tier: ObjectTier,
        planner: Planner,
        metrics: Metrics,
        executor: Executor,
        *,
        nbytes_max: int,
        now: Callable[[], float],
    ) -> None:
        """nbytes_max: of records brought up for one prefix."""
        self._nbytes_max = nbytes_max
        self._tier = tier
        self._planner = planner
        self._metrics = metrics
        self._executor = executor
        self._now = now
        self._loads = Loads(metrics, now)
        self._room = asyncio.Semaphore(WINDOWS_MAX)
        self._under_way: dict[_Window, asyncio.Task[bool]] = {}
        self._doomed: set[_Window] = set()  # of these

    async def bring_up(self, ask: Ask, match: Match, deadline: float) -> Ended:
        """Make the hit of a prefix longer than `match`, as far as the bucket has more of it."""
        namespace = self._planner.namespace(ask.namespace_id)
        aligned = run_blocks(namespace)
        start = match.hit_blocks // aligned * aligned
        found = await self._tier.find(
            ask.namespace_id,
            ask.keys[start:],
            run_blocks=aligned,
            deadline=min(deadline, ask.look_until),
        )
        places = {
            (frame.header.blocks[at].key, frame.header.part): _Place(frame, at)
            for frame in found.frames
            for at in frame.live
        }
        goal = self._goal(ask, start + found.blocks, places)
        goal = min(goal, match.hit_blocks + self._nbytes_max // _block_nbytes(namespace))
        windows = list(self._windows(ask, goal)) if goal > match.hit_blocks else []
        nbytes = sum(window.nbytes for window in windows)
        if not nbytes:
            return Ended.DONE
        stakes = ask.stakes(Match(goal, match.hit_blocks))
        race = self._loads.race(nbytes, stakes) if stakes is not None else None
        if stakes is not None and race is None:
            return Ended.CUT
        began = self._now()
        parts = [self._started(window, places) for window in windows]
        return await self._loads.wait(
            parts,
            nbytes,
            began=began,
            deadline=deadline,
            race=race,
            came_up=lambda: all(part.result() for part in parts),
        )

    def forget(self, namespace_id: NamespaceId, keys: Collection[BlockKey] | None) -> None:
        """Let nothing come up any more that is on its way and deleted now; None: all of it."""
        dead = set(keys or ())
        for window in self._under_way:
            if window.namespace_id == namespace_id and (keys is None or dead & set(window.keys)):
                self._doomed.add(window)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _goal(self, ask: Ask, blocks: int, places: Mapping[_Record, _Place]) -> int:
        """Return how long the hit is with what the bucket has."""
        namespace = self._planner.namespace(ask.namespace_id)
        keys = ask.keys[:blocks]
        masks = []
        for key, block in zip(keys, self._planner.index.find(ask.namespace_id, keys), strict=True):
            mask = block.complete if block is not None else 0
            stored = block.parts if block is not None else {}
            for group, spec in enumerate(namespace.groups):
                parts = [Part(group, shard) for shard in range(spec.shards)]
                if all(part in stored or (key, part) in places for part in parts):
                    mask |= 1 << group
            masks.append(mask)
        return longest_hit(namespace, masks, ask.skip_blocks)

    def _windows(self, ask: Ask, goal: int) -> Iterator[_Window]:
        """Cut what a hit of `goal` blocks lacks into pieces, in prefix order."""
        namespace = self._planner.namespace(ask.namespace_id)
        spans = needed_spans(namespace, goal, ask.skip_blocks)
        step = max(1, WINDOW_NBYTES // _block_nbytes(namespace))
        for first in range(min(span.begin for span in spans), goal, step):
            keys = tuple(ask.keys[first : min(first + step, goal)])
            clipped = tuple(
                Span(part, max(begin, first) - first, min(end, first + len(keys)) - first)
                for part, begin, end in spans
                if begin < first + len(keys) and end > first
            )
            records = self._planner.find(ask.namespace_id, keys, clipped)
            sizes = [
                namespace.record_nbytes(part)
                for part, begin, end in clipped
                for _ in range(begin, end)
            ]
            nbytes = sum(
                size for size, record in zip(sizes, records, strict=True) if record is None
            )
            if nbytes:
                parent = ask.keys[first - 1] if first else None
                yield _Window(ask.namespace_id, first, keys, parent, clipped, nbytes)

    def _started(self, window: _Window, places: Mapping[_Record, _Place]) -> asyncio.Task[bool]:
        """Return the task that brings a window, which goes on whoever stops waiting for it."""
        task = self._under_way.get(window)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._quietly(window, places))
            self._under_way[window] = task
            task.add_done_callback(lambda _: self._ended(window))
        return task

    def _ended(self, window: _Window) -> None:
        del self._under_way[window]
        self._doomed.discard(window)

    async def _quietly(self, window: _Window, places: Mapping[_Record, _Place]) -> bool:
        async with self._room:
            try:
                return await self._bring(window, places)
            except KVStoreError as error:
                self._metrics.read_errors.inc()
                logger.warning("fetch=failed blocks=%d reason=%r", len(window.keys), str(error))
                return False

    async def _bring(self, window: _Window, places: Mapping[_Record, _Place]) -> bool:
        """Write a window of records into the store. False: some could not be had."""
        grant = await self.store.reserve(
            DAEMON_SESSION,
            window.namespace_id,
            window.keys,
            first_block=window.first,
            parent=window.parent,
            spans=window.spans,
        )
        try:
            records = [
                (window.keys[at], part)
                for part, begin, end in window.spans
                for at in range(begin, end)
            ]
            wanted = [
                (self.store.view(slot), places.get(record))
                for slot, record in zip(grant.slots, records, strict=True)
                if slot is not None
            ]
            sums = await self._fill(wanted, grant.deadline_s)
            if grant.refused or sums is None:
                return False
            if window in self._doomed:
                return False
            left = iter(sums)
            checksums = [next(left) if slot is not None else 0 for slot in grant.slots]
            await self.store.commit(DAEMON_SESSION, grant.lease_id, checksums)
            if window in self._doomed:  # between two steps of the commit
                await self.store.delete(window.namespace_id, window.keys)
                return False
            return True
        finally:
            self.store.release(DAEMON_SESSION, [grant.lease_id])

    async def _fill(
        self, wanted: Sequence[tuple[memoryview, _Place | None]], lease_s: float
    ) -> list[int] | None:
        """Read records into their slots; return their checksums, None if one could not be had."""
        places = [place for _, place in wanted if place is not None]
        if len(places) < len(wanted) or not all(
            place.block.raw_nbytes == len(view) and place.block.stored_nbytes <= 2 * len(view)
            for (view, _), place in zip(wanted, places, strict=True)
        ):
            return None
        stored = [
            view
            if place.frame.header.codec_id == 0
            else memoryview(bytearray(place.block.stored_nbytes))
            for (view, _), place in zip(wanted, places, strict=True)
        ]
        reads = [
            ObjectRead(place.frame.location, place.begin, [buffer])
            for place, buffer in zip(places, stored, strict=True)
        ]
        deadline = self._now() + LEASE_MARGIN * lease_s
        if set(await self._tier.read(reads, deadline)) - {Outcome.READ}:
            return None
        self._metrics.bytes.labels("object", "read").inc(sum(read.nbytes for read in reads))
        good = await asyncio.get_running_loop().run_in_executor(
            self._executor, _all_good, [view for view, _ in wanted], stored, places
        )
        if not good:
            self._metrics.corrupt_blocks.labels("object").inc()
            return None
        return [place.block.raw_checksum for place in places]


def _block_nbytes(namespace: Namespace) -> int:
    return sum(padded(group.record_nbytes) * group.shards for group in namespace.groups)


def _all_good(
    views: Sequence[memoryview], stored: Sequence[memoryview], places: Sequence[_Place]
) -> bool:
    """Decode what needs it; return whether every record is what was put."""
    for view, buffer, place in zip(views, stored, places, strict=True):
        codec_id, expected = place.frame.header.codec_id, place.block.raw_checksum
        if codec_id == 0:
            if checksum(view) != expected:
                return False
        elif not decodes_to(codec_id, buffer, view, expected):
            return False
    return True
