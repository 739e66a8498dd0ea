"""The object tier: runs of blocks in a bucket that several daemons share.

Start here. `names` and `layout` say what is stored, `walk` how a prefix is found, `collection` who
leaves: all of that is pure. `requests` talks to the bucket, `upkeep` keeps house in the background.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from kvstore.format.frame import FrameHeader
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import CorruptBlock, InvalidRequest, KVStoreError, Unavailable
from kvstore.settings import ObjectSettings
from kvstore.system.background import keep_running
from kvstore.system.threads import outlive
from kvstore.tier.object.budget import ByteBudget
from kvstore.tier.object.catalog import Catalog, Directory, Entry
from kvstore.tier.object.connect import connect
from kvstore.tier.object.failure import ObjectFailed, ObjectGone, ObjectRefused
from kvstore.tier.object.footers import fetch_footer
from kvstore.tier.object.layout import Run, lay_out
from kvstore.tier.object.names import Listed, RunName, TombstoneName, directory, parse_run_name
from kvstore.tier.object.ranges import ObjectRead, Request, plan_requests
from kvstore.tier.object.requests import Bucket, Filled, Requests
from kvstore.tier.object.tombstones import KEYS_MAX, Tombstone, Tombstones, encode_tombstone
from kvstore.tier.object.upkeep import Upkeep
from kvstore.tier.object.walk import Found, Walk, Wanted

logger = logging.getLogger(__name__)


class Outcome(Enum):
    """What became of a read."""

    READ = "read"
    GONE = "gone"  # the object was collected: a miss
    FAILED = "failed"  # not to be had now


class ObjectTier:
    """One bucket prefix. Lives on one event loop; every deadline is on `now`'s clock."""

    def __init__(
        self,
        settings: ObjectSettings,
        metrics: Metrics,
        *,
        bucket: Bucket | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """bucket: instead of the one `settings.url` names. Raises ConfigError."""
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._requests = Requests(
            bucket if bucket is not None else connect(settings),
            metrics=metrics,
            now=now,
            timeout_s=settings.timeout_s,
            requests_max=settings.requests_max,
        )
        self._catalog = Catalog(now, settings.believed_s)
        self._tombstones = Tombstones()
        self._upkeep = Upkeep(
            self._requests,
            self._catalog,
            self._tombstones,
            settings=settings,
            metrics=metrics,
            now=now,
        )
        self._budget = ByteBudget(settings.in_flight_bytes_max)
        self._shared: dict[Directory | Entry, asyncio.Task[None]] = {}
        self._writing: dict[asyncio.Future[None], Run] = {}
        self._task: asyncio.Task[None] | None = None
        for state, value in {
            "capacity": lambda: self.capacity_bytes,
            "counted": lambda: self.physical_nbytes,
            "in_flight": lambda: self._budget.held_nbytes,
        }.items():
            metrics.object_bytes.labels(state).set_function(value)

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap; what is over it is collected when the bucket is counted next."""
        self._settings = replace(self._settings, capacity_bytes=nbytes)
        self._upkeep.set_capacity(nbytes)

    @property
    def capacity_bytes(self) -> int:
        """The cap, of all daemons together."""
        return self._settings.capacity_bytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes in the bucket by the last count, and what this daemon has written since, or is
        about to."""
        return self._upkeep.nbytes + self._budget.held_nbytes

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of what was in the bucket at the last count."""
        return self._upkeep.namespaces

    def stats(self) -> dict[str, Any]:
        return {
            "capacity_bytes": self.capacity_bytes,
            "physical_bytes": self.physical_nbytes,
            "in_flight_bytes": self._budget.held_nbytes,
            "objects": self._upkeep.objects,
            "state": self._state(),
            "reason": self._upkeep.problem,
            "advice": self._upkeep.advice,
        }

    def _state(self) -> str:
        if self._upkeep.refused.is_set():
            return "refused"
        return "ok" if self._requests.breaker.closed else "failing"

    def start(self) -> None:
        """Begin the upkeep. Until it has asked what was deleted, nothing is found; until it has
        counted, nothing is written. Waits for nothing, so a store that is down delays no start."""
        self._task = asyncio.get_running_loop().create_task(
            keep_running("bucket", self._upkeep.run, self._metrics.task_failed)
        )

    async def ready(self, deadline: float) -> None:
        """Wait until the tier finds and writes. Raises ObjectFailed, and ObjectRefused at once if
        the store refuses, which no waiting mends."""
        upkeep = self._upkeep
        known = asyncio.gather(upkeep.informed.wait(), upkeep.surveyed.wait())
        refused = asyncio.create_task(upkeep.refused.wait())
        try:
            await asyncio.wait(
                (known, refused),
                timeout=max(0.0, deadline - self._now()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if known.done():
                return
            if refused.done():
                raise ObjectRefused(upkeep.problem, reason="refused")
            raise ObjectFailed("the object store was not ready", reason="timeout")
        finally:
            known.cancel()
            refused.cancel()
            await asyncio.gather(known, refused, return_exceptions=True)

    async def collect(self) -> None:
        """Do at once what the upkeep does from time to time. Raises Unavailable."""
        await self._upkeep.inform()
        await self._upkeep.collect()

    async def close(self) -> None:
        """Stop. Cancel writes and reads of yours before."""
        tasks = [*self._shared.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._requests.close()

    # ---- find ----------------------------------------------------------------------------------

    async def find(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        run_blocks: int,
        deadline: float,
    ) -> Found:
        """Return what the bucket has of a prefix, as far as it was found out by the deadline.

        See `look`.
        """
        looking = self.look(namespace_id, keys, run_blocks=run_blocks, deadline=deadline)
        async for found in looking:
            last = found
        return last

    async def look(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        run_blocks: int,
        deadline: float,
    ) -> AsyncIterator[Found]:
        """Yield what the bucket has of a prefix: more and more of it while the rest is asked for,
        and in the end all that was found out by the deadline.

        keys[0]: the first block of the prefix, or one at a multiple of `run_blocks`. Never raises
        for a store that fails: then less is found, and the answer says it is not complete. Lookups
        that need the same listing or footer share the request.
        """
        walk = Walk(namespace_id, keys, run_blocks, self._catalog, self._tombstones)
        if not self._upkeep.informed.is_set():
            yield walk.found(complete=False)
            return
        asked: dict[Directory | Entry, asyncio.Task[None]] = {}
        told = 0
        while not walk.ended:
            wanted = walk.step()
            if wanted == Wanted():
                await asyncio.sleep(0)  # a long prefix, all of it known: others' turn, too
                continue
            for each in (*wanted.now, *wanted.ahead):
                asked[each] = asked.get(each) or self._ask(each)
            if walk.position > told:
                told = walk.position
                yield walk.found(complete=False)
                continue  # it may be answered by now
            answered = all(asked[each].done() for each in wanted.now)
            timeout_s = deadline - self._now()
            if answered or timeout_s <= 0:  # it was asked for, and could not be found out
                yield walk.found(complete=False)
                return
            pending = [task for task in asked.values() if not task.done()]
            await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        yield walk.found(complete=True)

    def _ask(self, wanted: Directory | Entry) -> asyncio.Task[None]:
        """Return the task that finds out, which goes on whoever stops waiting for it."""
        task = self._shared.get(wanted)
        if task is None:
            work = self._read_footer(wanted) if isinstance(wanted, Entry) else self._list(wanted)
            task = asyncio.get_running_loop().create_task(self._quietly(work))
            self._shared[wanted] = task
            task.add_done_callback(lambda _: self._shared.pop(wanted))
        return task

    async def _quietly(self, work: Awaitable[None]) -> None:
        with suppress(Unavailable):  # counted where it happened; the catalog does not know, then
            await work

    async def _list(self, wanted: Directory) -> None:
        page = await self._requests.first_page(directory(*wanted), self._lookup_deadline())
        self._catalog.listed(wanted, [e for e in map(_entry, page) if e and e.directory == wanted])

    async def _read_footer(self, entry: Entry) -> None:
        try:
            run = await fetch_footer(self._requests, entry, self._lookup_deadline())
        except ObjectGone:
            self._catalog.gone(entry.name)
        except CorruptBlock as error:
            self._metrics.corrupt_blocks.labels("object").inc()
            logger.warning("object=corrupt reason=%r", str(error))
            self._catalog.read(entry.name, None)
        else:
            self._catalog.read(entry.name, run)

    def _lookup_deadline(self) -> float:
        return self._now() + 2 * self._settings.timeout_s

    # ---- read ----------------------------------------------------------------------------------

    async def read(self, reads: Sequence[ObjectRead], deadline: float) -> list[Outcome]:
        """Fill the targets of `reads`; say of each what became of it.

        Bytes are not verified here. The targets belong to the tier until this returns, cancelled or
        not. Those of a read that was not READ are unspecified.
        """
        requests = plan_requests(reads)
        spread = Counter(read for request in requests for read in set(request.reads))

        def told(request: Request, index: int) -> None:
            read = request.ends(index)
            if read >= 0 and spread[read] == 1 and (then := reads[read].then) is not None:
                then()

        jobs = (self._fetch(request, partial(told, request), deadline) for request in requests)
        results = await asyncio.gather(*jobs, return_exceptions=True)  # when it returns, all ended
        outcomes = [Outcome.READ] * len(reads)
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            for read in set(request.reads) - {-1}:
                if outcomes[read] is not Outcome.GONE and result is not Outcome.READ:
                    outcomes[read] = result
        for index, whole in enumerate(reads):
            if spread[index] > 1 and outcomes[index] is Outcome.READ and whole.then is not None:
                await _finish(whole.then)
        return outcomes

    async def _fetch(self, request: Request, told: Filled, deadline: float) -> Outcome:
        try:
            await self._requests.get(request.name, request.start, request.buffers, deadline, told)
        except ObjectGone:
            name = parse_run_name(request.name)
            if name is not None:
                self._catalog.gone(name)
            return Outcome.GONE
        except Unavailable:
            return Outcome.FAILED
        return Outcome.READ

    # ---- write ---------------------------------------------------------------------------------

    async def write(
        self, frames: Sequence[tuple[FrameHeader, Sequence[memoryview]]], deadline: float
    ) -> Run:
        """Store frames of one run as one object; return what and where it is.

        Each frame: its header (sequence and place are the tier's to choose) and its blocks' stored
        bytes, padded to whole pages. The buffers stay untouched until this returns. Waits while too
        many bytes are under way. The name is a digest of the content: who writes the same bytes at
        the same time overwrites them with themselves.

        Raises InvalidRequest, or Unavailable (no room, no answer); then it may or may not be there.
        """
        run, pages, footer = lay_out([header for header, _ in frames])
        buffers: list[memoryview] = []
        for page, (header, payload) in zip(pages, frames, strict=True):
            if PAGE_NBYTES + sum(buffer.nbytes for buffer in payload) != header.nbytes:
                raise InvalidRequest("the payload has another size than its header says")
            buffers += [memoryview(page), *payload]
        with self._counted_refusals():
            if not self._catalog.has(run.name):
                deadline = min(deadline, self._now() + self._settings.grace_s / 2)
                await self._store(run, [*buffers, memoryview(footer)], deadline)
        return run

    async def _store(self, run: Run, buffers: Sequence[memoryview], deadline: float) -> None:
        self._check_room(run, ahead_nbytes=run.nbytes)
        # Under way from the first await on: a delete either waits for it, or was known before.
        with self._under_way(run):
            async with self._budget.take(run.nbytes, deadline - self._now()):
                self._check_room(run, ahead_nbytes=0)  # it is among the bytes in flight by now
                await self._requests.put(str(run.name), buffers, run.nbytes, deadline)
                self._upkeep.wrote(run.nbytes)
                self._catalog.written(run, await self._modified(run.name, deadline))

    async def _modified(self, name: RunName, deadline: float) -> float:
        """Return when an object of ours was stored, if any tombstone has to be compared with it.

        Otherwise it counts as old: a tombstone that comes kills it here too, and what the next
        listing says of it is true.
        """
        if not self._tombstones.any_in(name.namespace_id):
            return 0.0
        return (await self._requests.head(str(name), deadline)).modified

    def _check_room(self, run: Run, *, ahead_nbytes: int) -> None:
        if not self._upkeep.surveyed.is_set():
            raise ObjectFailed("the bucket is not counted yet", reason="unsurveyed")
        if self.physical_nbytes + ahead_nbytes > self.capacity_bytes:
            self._upkeep.collect_soon(run.nbytes)
            raise ObjectFailed("the bucket is at its cap", reason="full")

    @contextmanager
    def _under_way(self, run: Run) -> Iterator[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing[done] = run
        try:
            yield
        finally:
            del self._writing[done]
            done.set_result(None)

    @contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            self._metrics.object_refused_writes.labels(error.reason).inc()
            raise

    # ---- delete --------------------------------------------------------------------------------

    async def delete(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey] | None, deadline: float
    ) -> None:
        """Bury keys, or (None) a whole namespace: for every daemon, and before this returns.

        Forget them elsewhere first, so that nothing of theirs is on its way up any more but what
        this waits for. Others see it within `believed_s`. Objects that hold a buried block are
        deleted as a whole: those known here at once, the others by the next collection.

        Raises Unavailable if the tombstone may not be stored: then they may come back.
        """
        wanted = None if keys is None else set(keys)
        under_way = [done for done, run in self._writing.items() if run.holds(namespace_id, wanted)]
        if under_way:
            _, pending = await asyncio.wait(under_way, timeout=max(0.0, deadline - self._now()))
            if pending:
                raise ObjectFailed("a write of it did not end in time", reason="timeout")
        for start in range(0, 1 if keys is None else len(keys), KEYS_MAX):
            batch = None if keys is None else keys[start : start + KEYS_MAX]
            await self._bury(namespace_id, batch, deadline)
        names = [run.name for run in self._catalog.holding(namespace_id, keys)]
        try:
            await self._requests.delete(list(map(str, names)), deadline)
        except KVStoreError as error:
            logger.warning("object=not_deleted count=%d reason=%r", len(names), str(error))
            return
        for name in names:
            self._catalog.gone(name)
        self._metrics.object_collected.labels("deleted").inc(len(names))

    async def _bury(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey] | None, deadline: float
    ) -> None:
        name = TombstoneName(namespace_id, int.from_bytes(os.urandom(8), "big"))
        data = encode_tombstone(name, keys)
        await self._requests.put(str(name), [data], len(data), deadline)
        stored = await self._requests.head(str(name), deadline)
        killed = None if keys is None else frozenset(keys)
        self._tombstones.add(Tombstone(name, stored.modified, killed))


async def _finish(then: Callable[[], None]) -> None:
    """Run `then` in a thread to its end, cancelled or not."""
    work = asyncio.ensure_future(asyncio.to_thread(then))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await outlive([work])
        raise


def _entry(listed: Listed) -> Entry | None:
    name = parse_run_name(listed.name)
    return Entry(name, listed.nbytes, listed.modified) if name is not None else None
