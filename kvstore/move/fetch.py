"""From a bucket or another host into the arena: what a prefix lacks is written into the store as
any writer would.

So neither the index nor the policies know of sources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore.decide.ask import Ask
from kvstore.decide.costs import usual_nbytes
from kvstore.decide.pace import Race, Stakes
from kvstore.decide.planner import (
    DAEMON_SESSION,
    Planner,
    fine_slots,
    longest_hit,
    needed_spans,
)
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Grant, Match, Namespace, Part, Span
from kvstore.model.errors import KVStoreError
from kvstore.model.pair import belongs
from kvstore.move.deletions import Deletions, Watch
from kvstore.move.load import Load, block_nbytes, window_ends
from kvstore.move.load_race import Ended, was_brought
from kvstore.move.source import (
    STEP_BLOCKS,
    Candidate,
    Listing,
    Reading,
    Window,
)
from kvstore.move.writer import Writer

logger = logging.getLogger(__name__)

WINDOWS_MAX = 8  # on their way at once; beyond that they queue in prefix order
WAITING_WINDOWS_MAX = 256  # for blocks that are still being computed
TEACHING_SHARE = 0.25  # of a load's blocks: if more are still to be computed, it tells no pace
LEASE_MARGIN = 0.8  # of a lease's time, to read into its slots


class Fetch:
    """Brings prefixes from sources. `store`: set before the first call."""

    store: Writer

    def __init__(
        self,
        planner: Planner,
        metrics: Metrics,
        *,
        deletions: Deletions,
        now: Callable[[], float],
    ) -> None:
        self.nbytes_max = 0  # of records fetched for one prefix
        self._deletions = deletions
        self._planner = planner
        self._metrics = metrics
        self._now = self.now = now
        self._room = asyncio.Semaphore(WINDOWS_MAX)
        self._waiting_room = asyncio.Semaphore(WAITING_WINDOWS_MAX)
        self._under_way: dict[tuple[str, Window], asyncio.Task[bool]] = {}

    async def promote(self, candidate: Candidate, ask: Ask, match: Match, deadline: float) -> Ended:
        """Make the hit of a prefix longer than `match`, as far as a source has more of it.

        Its start is fetched while its end is still looked for. Fine parts that nobody insists on
        come when all bases have come, and are waited for in the time that is left.
        """
        namespace = self._planner.namespace(ask.namespace_id)
        most = self.nbytes_max // block_nbytes(namespace, fine=ask.refined)
        source, listing = candidate
        with self._deletions.watch(ask.namespace_id, ask.keys) as watch:
            load = Load(ask, watch, namespace, source, listing, match.hit_blocks, most)
            async for _ in listing.look(min(deadline, ask.look_until)):
                await self._begin_early(load)
            goal = await self._goal(load)
            rest = []
            if goal > match.hit_blocks:
                rest = await self._windows(load, load.begun, goal, fine=ask.refined)
            nbytes = load.nbytes + sum(window.nbytes for window in rest)
            if not nbytes:
                return Ended.DONE
            stakes = ask.stakes(Match(goal, match.hit_blocks))
            race = self._race(load, goal, nbytes, stakes)
            if stakes is not None and race is None:
                return Ended.CUT
            self._begin(load, rest)
            ended = await source.races.wait(
                load.parts,
                nbytes,
                began=load.began,
                deadline=deadline,
                race=race,
                arrived=lambda: all(part.result() for part in load.parts),
                teaches=listing.coming <= TEACHING_SHARE * (goal - match.hit_blocks),
            )
            if ended is Ended.DONE and namespace.fine and listing.brings_fine and not ask.refined:
                await self._refine(load, goal, min(deadline, ask.look_until))
            return ended

    async def _refine(self, load: Load, goal: int, deadline: float) -> None:
        """Begin to bring the fine parts of a prefix, and wait for them until the deadline. None of
        a prefix that did not come whole, or of which something was deleted: a window has what is
        missing of its bases as well."""
        if not all(map(was_brought, load.parts)):
            return
        windows = await self._windows(load, load.ask.skip_blocks, goal, fine=True)
        if load.watch.dead:
            return
        tasks, left = [], self.nbytes_max - load.nbytes
        for window in windows:
            left -= window.nbytes
            if left >= 0 and _has_fine(load.namespace, window):
                tasks.append(self._started(load, window))
        wait_s = deadline - self._now()
        if tasks and wait_s > 0:
            await asyncio.wait(tasks, timeout=wait_s)

    @staticmethod
    def _race(load: Load, goal: int, nbytes: int, stakes: Stakes | None) -> Race | None:
        if stakes is None:
            return None
        coming = load.listing.coming
        share = min(1.0, coming / max(1, goal - load.hit))  # some may be gone
        # What another engine is computing is waited for as it comes: when most of it is there, the
        # time that it took is lost already.
        whole = load.namespace.has_windows and not coming
        elsewhere_s = share * stakes.saved_s
        return load.source.races.race(nbytes, stakes, elsewhere_s=elsewhere_s, whole=whole)

    async def _begin_early(self, load: Load) -> None:
        """Begin what a hit of every length needs, in whole windows, as far as it is found.

        Which windows of a window group are needed, only the length of the hit can say.
        """
        ask, namespace = load.ask, load.namespace
        if namespace.has_windows:
            return
        first = max(load.begun, ask.skip_blocks)
        masks = await self._masks(load, first, min(load.listing.found, load.goal_max))
        everything = (1 << len(namespace.groups)) - 1
        there = next((i for i, mask in enumerate(masks) if mask != everything), len(masks))
        ends = window_ends(load, first, first + there)
        goal = max((end for end in ends if end <= first + there), default=first)
        windows = []
        if goal > first:
            windows = await self._windows(load, first, goal, fine=ask.refined)
        nbytes = load.nbytes + sum(window.nbytes for window in windows)
        stakes = ask.stakes(Match(goal, load.hit))
        if stakes is not None and load.source.races.pace.loses(nbytes, stakes.saved_s):
            return  # more of it may be worth loading
        self._begin(load, windows)
        load.begun = goal

    def _begin(self, load: Load, windows: Sequence[Window]) -> None:
        if not load.parts:
            load.began = self._now()
        load.parts |= {self._started(load, window): window.nbytes for window in windows}
        load.nbytes += sum(window.nbytes for window in windows)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _goal(self, load: Load) -> int:
        """Return how long the hit is with what the source has."""
        masks = await self._masks(load, 0, load.listing.found)
        alive = masks[: max(load.goal_max, load.ask.skip_blocks)]
        return min(longest_hit(load.namespace, alive, load.ask.skip_blocks), load.goal_max)

    async def _masks(self, load: Load, begin: int, end: int) -> list[int]:
        """Return which groups of some blocks are here or at the source: bit g for group g."""
        ask, namespace, has = load.ask, load.namespace, load.listing.has
        groups = [
            (1 << group, [Part(group, shard) for shard in range(spec.shards)])
            for group, spec in enumerate(namespace.groups)
            if spec.refines == -1
        ]
        masks = []
        for first in range(begin, end, STEP_BLOCKS):
            await asyncio.sleep(0)
            keys = ask.keys[first : min(first + STEP_BLOCKS, end)]
            stored = self._planner.index.find(ask.namespace_id, keys)
            for key, block in zip(keys, stored, strict=True):
                here = {r.part for r in block.records} if block is not None else set()
                mask = block.complete if block is not None else 0
                for bit, parts in groups:
                    if not mask & bit and all(part in here or has(part, key) for part in parts):
                        mask |= bit
                if namespace.fine:
                    mask = load.listing.with_fine(key, block, mask)
                masks.append(mask)
        return masks

    async def _windows(self, load: Load, begin: int, goal: int, *, fine: bool) -> list[Window]:
        """Cut what a hit of `goal` blocks lacks from `begin` on into pieces, in prefix order. fine:
        with the fine parts."""
        ask, namespace = load.ask, load.namespace
        spans = needed_spans(namespace, goal, ask.skip_blocks)
        windows = []
        last = max(begin, min(span.begin for span in spans))
        for end_of_window in window_ends(load, last, goal):
            await asyncio.sleep(0)
            first, last = last, min(end_of_window, goal)
            keys = tuple(ask.keys[first:last])
            clipped = tuple(
                Span(part, max(begin, first) - first, min(end, first + len(keys)) - first)
                for part, begin, end in spans
                if begin < first + len(keys) and end > first
            )
            if fine:
                clipped += load.listing.fine_spans(keys, clipped)
            missing = iter(self._planner.find(ask.namespace_id, keys, clipped))
            nbytes = sum(
                sum(next(missing) is None for _ in range(begin, end))
                * usual_nbytes(namespace, part)
                for part, begin, end in clipped
            )
            if nbytes:
                parent = ask.keys[first - 1] if first else None
                windows.append(
                    Window(ask.namespace_id, first, keys, parent, clipped, nbytes, ask.refined)
                )
        return windows

    def _started(self, load: Load, window: Window) -> asyncio.Task[bool]:
        """Return the task that brings a window, which goes on whoever stops waiting for it."""
        key = (load.source.name, window)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._quietly(window, load.listing))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
        return task

    async def _quietly(self, window: Window, listing: Listing) -> bool:
        with self._deletions.watch(window.namespace_id, window.keys) as watch:
            return await self._in_turn(window, listing, watch)

    async def _in_turn(self, window: Window, listing: Listing, watch: Watch) -> bool:
        async with self._waiting_room if listing.coming else self._room:
            try:
                return not watch.dead and await self._bring(window, listing, watch)
            except KVStoreError as error:
                self._metrics.read_errors.inc()
                logger.warning("fetch=failed blocks=%d reason=%r", len(window.keys), str(error))
                return False

    async def _bring(self, window: Window, listing: Listing, watch: Watch) -> bool:
        """Write a window of records into the store. False: some could not be had."""
        useless: list[tuple[Part, BlockKey]] = []
        if await self._bring_all(window, listing, watch, useless):
            return True
        if not useless:
            return False
        _forget(listing, useless)
        namespace = self._planner.namespace(window.namespace_id)
        spans = tuple(span for span in window.spans if span.part.group not in namespace.fine)
        fine = listing.fine_spans(window.keys, spans)
        again = {(part, key) for part, begin, end in fine for key in window.keys[begin:end]}
        if fine and again.isdisjoint(useless):
            rest = replace(window, spans=spans + fine, refined=False)
            also: list[tuple[Part, BlockKey]] = []
            if await self._bring_all(rest, listing, watch, also):
                return not window.refined
            if not also:
                return False
            _forget(listing, also)
        bases = replace(window, spans=spans, refined=False)
        return await self._bring_all(bases, listing, watch, []) and not window.refined

    async def _bring_all(
        self,
        window: Window,
        listing: Listing,
        watch: Watch,
        useless: list[tuple[Part, BlockKey]],
    ) -> bool:
        """Write a window of records into the store. False: some could not be had. Fine parts that
        are wrong, or belong to another base, are put into `useless`."""
        reading = await listing.open(window)
        if reading is None:
            return False
        try:
            grant = await self._reserve(window, reading, copy=listing.copies)
            try:
                checksums = await self._fill(window, reading, grant, useless)
                if checksums is None or watch.dead:
                    return False
                await self.store.puts.commit(DAEMON_SESSION, grant.lease_id, checksums)
                if watch.dead:  # between two steps of the commit
                    await self.store.deletes.delete(window.namespace_id, list(watch.dead))
                    return False
                return True
            finally:
                self._let_go(grant, reading)
        finally:
            await reading.close()

    def _let_go(self, grant: Grant, reading: Reading) -> None:
        """Give reserved slots back, when nothing can write into them any more. Until then they
        stay leased, or in limbo when that lease is over."""
        limbo = reading.limbo
        if limbo is None or limbo.done():
            self.store.release(DAEMON_SESSION, [grant.lease_id])
            return
        self._metrics.read_errors.inc()
        logger.error("fetch=limbo slots=%d", len(grant.slots))
        limbo.add_done_callback(lambda _: self.store.release(DAEMON_SESSION, [grant.lease_id]))

    async def _reserve(self, window: Window, reading: Reading, *, copy: bool) -> Grant:
        namespace, sizes = self._planner.namespace(window.namespace_id), list[int]()
        if namespace.varies:
            parts = [part for part, begin, end in window.spans for _ in range(begin, end)]
            sizes = [
                nbytes or namespace.record_nbytes(part)
                for part, nbytes in zip(parts, reading.sizes, strict=True)
            ]
        return await self.store.puts.reserve(
            DAEMON_SESSION,
            window.namespace_id,
            window.keys,
            first_block=window.first,
            parent=window.parent,
            spans=window.spans,
            sizes=sizes,
            refined=window.refined,
            copy=copy,
            bases=reading.checksums if _has_fine(namespace, window) else (),
        )

    async def _fill(
        self,
        window: Window,
        reading: Reading,
        grant: Grant,
        useless: list[tuple[Part, BlockKey]],
    ) -> list[int] | None:
        """Read records into their slots; return the checksums to commit. None: some could not be
        had, or belong to another base."""
        namespace = self._planner.namespace(window.namespace_id)
        records = [
            (part, key) for part, begin, end in window.spans for key in window.keys[begin:end]
        ]
        targets = [self.store.view(slot) if slot is not None else None for slot in grant.slots]
        fits = all(
            target is None or not nbytes or len(target) == nbytes
            for target, nbytes in zip(targets, reading.sizes, strict=True)
        )
        if grant.refused or not fits:
            return None
        deadline = self._now() + LEASE_MARGIN * grant.deadline_s
        checksums = await reading.fill(targets, deadline)
        if checksums is None:
            wrong = [records[at] for at in reading.wrong]
            useless += [record for record in wrong if record[0].group in namespace.fine]
            return None
        bases = reading.checksums or checksums  # a base that is here already was not read
        for at, base_at, _ in fine_slots(namespace, window.spans):
            target = targets[at]
            if target is not None and not belongs(target, bases[base_at]):
                useless.append(records[at])
        self._metrics.corrupt_blocks.labels("pair").inc(len(useless))
        return None if useless else checksums


def _forget(listing: Listing, useless: Sequence[tuple[Part, BlockKey]]) -> None:
    listing.forget(useless)
    logger.warning("fetch=useless parts=%d key=%s", len(useless), useless[0][1][:4].hex())


def _has_fine(namespace: Namespace, window: Window) -> bool:
    return any(part.group in namespace.fine for part, _, _ in window.spans)
