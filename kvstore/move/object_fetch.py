"""Object tier to arena: what a prefix lacks is written into the store as any writer would.

So records that come from a bucket are dirty, and written behind to the file tier, like all others;
neither the index nor the policies know of the bucket.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvstore.decide.ask import Ask
from kvstore.decide.planner import (
    DAEMON_SESSION,
    Planner,
    fine_slots,
    longest_hit,
    needed_spans,
)
from kvstore.format.codec import decodes_to
from kvstore.metrics import Metrics
from kvstore.model.block import (
    Match,
    Part,
    Span,
)
from kvstore.model.checksum import checksum
from kvstore.model.errors import KVStoreError
from kvstore.model.pair import belongs
from kvstore.move.load_race import Ended, LoadRaces
from kvstore.move.object_deletions import Deletions, Watch
from kvstore.move.object_load import (
    STEP_BLOCKS,
    Load,
    Place,
    Places,
    Record,
    Window,
    base_spans,
    block_nbytes,
    fine_spans,
    window_blocks,
    with_fine,
)
from kvstore.move.writer import Writer
from kvstore.tier.object import ObjectRead, ObjectTier, Outcome, run_blocks

logger = logging.getLogger(__name__)

WINDOWS_MAX = 8  # on their way at once; beyond that they queue in prefix order
UNPAIRED_MAX = 4096  # fine parts of another base that are remembered, and not read again
LEASE_MARGIN = 0.8  # of a lease's time, to read into its slots


class ObjectFetch:
    """Looks for prefixes in the bucket and brings them up. `store`: set before the first call."""

    store: Writer

    def __init__(
        self,
        tier: ObjectTier,
        planner: Planner,
        metrics: Metrics,
        *,
        watches: Deletions,
        nbytes_max: int,
        fine: bool = False,
        now: Callable[[], float],
    ) -> None:
        """nbytes_max: of records fetched for one prefix. fine: fine parts come with their bases;
        else for those who insist on them."""
        self._fine = fine
        self._deletions = watches
        self.nbytes_max = nbytes_max
        self._tier = tier
        self._planner = planner
        self._metrics = metrics
        self._now = now
        self._loads = LoadRaces(metrics, now)
        self._room = asyncio.Semaphore(WINDOWS_MAX)
        self._under_way: dict[Window, asyncio.Task[bool]] = {}
        self._unpaired: OrderedDict[Record, None] = OrderedDict()

    async def promote(self, ask: Ask, match: Match, deadline: float) -> Ended:
        """Make the hit of a prefix longer than `match`, as far as the bucket has more of it.

        Its start is fetched while its end is still looked for.
        """
        namespace = self._planner.namespace(ask.namespace_id)
        most = self.nbytes_max // block_nbytes(namespace)
        load = Load(ask, namespace, match.hit_blocks, most, self._unpaired)
        aligned = run_blocks(namespace)
        start = match.hit_blocks // aligned * aligned
        with self._deletions.watch(ask.namespace_id, ask.keys) as watch:
            looking = self._tier.lookups.look(
                ask.namespace_id,
                ask.keys[start:],
                run_blocks=aligned,
                deadline=min(deadline, ask.look_until),
                copies=bool(namespace.fine),
            )
            async for found in looking:
                await load.note(found, start)
                if not watch.dead:
                    await self._begin_early(load)
            goal = await self._goal(load)
            rest = await self._windows(load, load.begun, goal) if goal > match.hit_blocks else []
            nbytes = load.nbytes + sum(window.nbytes for window in rest)
            if not nbytes or watch.dead:
                return Ended.DONE
            stakes = ask.stakes(Match(goal, match.hit_blocks))
            race = self._loads.race(nbytes, stakes) if stakes is not None else None
            if stakes is not None and race is None:
                return Ended.CUT
            self._begin(load, rest)
        return await self._loads.wait(
            load.parts,
            nbytes,
            began=load.began,
            deadline=deadline,
            race=race,
            arrived=lambda: all(part.result() for part in load.parts),
        )

    async def _begin_early(self, load: Load) -> None:
        """Begin what a hit of every length needs, in whole windows, as far as it is found.

        Which windows of a window group are needed, only the length of the hit can say.
        """
        ask, namespace = load.ask, self._planner.namespace(load.ask.namespace_id)
        if any(group.window_tokens for group in namespace.groups):
            return
        step = window_blocks(namespace)
        first = max(load.begun, ask.skip_blocks)
        masks = await self._masks(load, first, min(load.found, load.goal_max))
        everything = (1 << len(namespace.groups)) - 1
        there = next((i for i, mask in enumerate(masks) if mask != everything), len(masks))
        goal = first + there // step * step
        windows = await self._windows(load, first, goal) if goal > first else []
        nbytes = load.nbytes + sum(window.nbytes for window in windows)
        stakes = ask.stakes(Match(goal, load.hit))
        if stakes is not None and self._loads.pace.loses(nbytes, stakes.saved_s):
            return  # more of it may be worth loading
        self._begin(load, windows)
        load.begun = goal

    def _begin(self, load: Load, windows: Sequence[Window]) -> None:
        if not load.parts:
            load.began = self._now()
        load.parts += [self._started(window, load.places) for window in windows]
        load.nbytes += sum(window.nbytes for window in windows)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _goal(self, load: Load) -> int:
        """Return how long the hit is with what the bucket has."""
        namespace = self._planner.namespace(load.ask.namespace_id)
        masks = await self._masks(load, 0, load.found)
        return min(longest_hit(namespace, masks, load.ask.skip_blocks), load.goal_max)

    async def _masks(self, load: Load, begin: int, end: int) -> list[int]:
        """Return which groups of some blocks are here or in the bucket: bit g for group g."""
        ask, namespace = load.ask, self._planner.namespace(load.ask.namespace_id)
        groups = []
        for group, spec in enumerate(namespace.groups):
            needed = [Part(group, shard) for shard in range(spec.shards)]
            if spec.refines == -1:
                groups.append((1 << group, [(part, load.places.get(part, {})) for part in needed]))
        masks = []
        for first in range(begin, end, STEP_BLOCKS):
            await asyncio.sleep(0)
            keys = ask.keys[first : min(first + STEP_BLOCKS, end)]
            stored = self._planner.index.find(ask.namespace_id, keys)
            for key, block in zip(keys, stored, strict=True):
                here = {r.part for r in block.records} if block is not None else set()
                mask = block.complete if block is not None else 0
                for bit, parts in groups:
                    if not mask & bit and all(p in here or key in there for p, there in parts):
                        mask |= bit
                if namespace.fine:
                    mask = with_fine(namespace, load, key, block, mask)
                masks.append(mask)
        return masks

    async def _windows(self, load: Load, begin: int, goal: int) -> list[Window]:
        """Cut what a hit of `goal` blocks lacks from `begin` on into pieces, in prefix order."""
        ask, namespace = load.ask, self._planner.namespace(load.ask.namespace_id)
        fine = self._fine or ask.refined
        spans = needed_spans(namespace, goal, ask.skip_blocks)
        step = window_blocks(namespace)
        windows = []
        for first in range(max(begin, min(span.begin for span in spans)), goal, step):
            await asyncio.sleep(0)
            keys = tuple(ask.keys[first : min(first + step, goal)])
            clipped = tuple(
                Span(part, max(begin, first) - first, min(end, first + len(keys)) - first)
                for part, begin, end in spans
                if begin < first + len(keys) and end > first
            )
            if fine:
                clipped += fine_spans(namespace, load.places, keys, clipped)
            missing = iter(self._planner.find(ask.namespace_id, keys, clipped))
            nbytes = sum(
                sum(next(missing) is None for _ in range(begin, end))
                * namespace.record_nbytes(part)
                for part, begin, end in clipped
            )
            if nbytes:
                parent = ask.keys[first - 1] if first else None
                windows.append(
                    Window(ask.namespace_id, first, keys, parent, clipped, nbytes, ask.refined)
                )
        return windows

    def _started(self, window: Window, places: Places) -> asyncio.Task[bool]:
        """Return the task that brings a window, which goes on whoever stops waiting for it."""
        task = self._under_way.get(window)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._quietly(window, places))
            self._under_way[window] = task
            task.add_done_callback(lambda _: self._under_way.pop(window))
        return task

    async def _quietly(self, window: Window, places: Places) -> bool:
        with self._deletions.watch(window.namespace_id, window.keys) as watch:
            return await self._in_turn(window, places, watch)

    async def _in_turn(self, window: Window, places: Places, watch: Watch) -> bool:
        async with self._room:
            try:
                return not watch.dead and await self._bring(window, places, watch)
            except KVStoreError as error:
                self._metrics.read_errors.inc()
                logger.warning("fetch=failed blocks=%d reason=%r", len(window.keys), str(error))
                return False

    async def _bring(self, window: Window, places: Places, watch: Watch) -> bool:
        """Write a window of records into the store. False: some could not be had."""
        unpaired: list[Place] = []
        if await self._bring_all(window, places, watch, unpaired):
            return True
        if not unpaired:
            return False
        for place in unpaired:
            self._unpaired[place.record] = None
        while len(self._unpaired) > UNPAIRED_MAX:
            self._unpaired.popitem(last=False)
        self._metrics.corrupt_blocks.labels("pair").inc(len(unpaired))
        logger.warning("fetch=unpaired key=%s", unpaired[0].block.key[:4].hex())
        spans = base_spans(self._planner.namespace(window.namespace_id), window.spans)
        bases = replace(window, spans=spans, refined=False)
        return await self._bring_all(bases, places, watch, []) and not window.refined

    async def _bring_all(
        self, window: Window, places: Places, watch: Watch, unpaired: list[Place]
    ) -> bool:
        """Write a window of records into the store. False: some could not be had, or belong to
        another base: these are put into `unpaired`."""
        found = [
            places.get(part, {}).get(key)
            for part, begin, end in window.spans
            for key in window.keys[begin:end]
        ]
        namespace, sizes = self._planner.namespace(window.namespace_id), list[int]()
        if namespace.varies:
            parts = [part for part, begin, end in window.spans for _ in range(begin, end)]
            sizes = [
                place.block.raw_nbytes if place else namespace.record_nbytes(part)
                for part, place in zip(parts, found, strict=True)
            ]
        grant = await self.store.puts.reserve(
            DAEMON_SESSION,
            window.namespace_id,
            window.keys,
            first_block=window.first,
            parent=window.parent,
            spans=window.spans,
            sizes=sizes,
            refined=window.refined,
        )
        try:
            wanted = [
                (self.store.view(slot), place)
                for slot, place in zip(grant.slots, found, strict=True)
                if slot is not None
            ]
            sums = await self._fill(wanted, grant.deadline_s)
            if grant.refused or sums is None or watch.dead:
                return False
            left = iter(sums)
            checksums = [next(left) if slot is not None else 0 for slot in grant.slots]
            for at, base_at, _ in fine_slots(namespace, window.spans):
                slot, place = grant.slots[at], found[at]
                if slot and place and not belongs(self.store.view(slot), checksums[base_at]):
                    unpaired.append(place)
            if unpaired:
                return False
            await self.store.puts.commit(DAEMON_SESSION, grant.lease_id, checksums)
            if watch.dead:  # between two steps of the commit
                await self.store.deletes.delete(window.namespace_id, list(watch.dead))
                return False
            return True
        finally:
            self.store.release(DAEMON_SESSION, [grant.lease_id])

    async def _fill(
        self, wanted: Sequence[tuple[memoryview, Place | None]], lease_s: float
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
        good = [False] * len(places)

        def verify(index: int) -> None:
            good[index] = _is_good(wanted[index][0], stored[index], places[index])

        reads = [
            ObjectRead(
                place.frame.location,
                place.begin,
                [buffer],
                partial(verify, index),
                (place.frame.header, place.position),
            )
            for index, (place, buffer) in enumerate(zip(places, stored, strict=True))
        ]
        deadline = self._now() + LEASE_MARGIN * lease_s
        if set(await self._tier.reads.read(reads, deadline)) - {Outcome.READ}:
            return None
        if not all(good):
            self._metrics.corrupt_blocks.labels("object").inc()
            return None
        return [place.block.raw_checksum for place in places]


def _is_good(view: memoryview, stored: memoryview, place: Place) -> bool:
    """Decode a record if it needs it; return whether it is what was put. Blocking."""
    codec_id, expected = place.frame.header.codec_id, place.block.raw_checksum
    if codec_id == 0:
        return checksum(view) == expected
    return decodes_to(codec_id, stored, view, expected)
