"""Background work on the bucket: read tombstones, count, collect, probe.

Each round lists the tombstones. Periodically a round lists everything instead, and deletes objects
that are too old or over the cap. A round is also the probe of the breaker, so no request is used to
find out that the store is still down. Ages are on the store's own clock: the round writes the tiny
object `clock` and reads its time. No decision uses the clock of this machine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, NamespaceId
from kvstore.model.errors import CorruptBlock, KVStoreError
from kvstore.settings import ObjectSettings
from kvstore.tier.object.advice import advice
from kvstore.tier.object.catalog import Catalog, Entry
from kvstore.tier.object.collection import Survey, Sweep
from kvstore.tier.object.failure import ObjectFailed, ObjectGone, ObjectRefused
from kvstore.tier.object.footers import fetch_footer
from kvstore.tier.object.keys import BucketKeys
from kvstore.tier.object.names import Listed, TombstoneName
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.seal import SealedNames
from kvstore.tier.object.tombstones import (
    TOMBSTONE_NBYTES_MAX,
    Tombstone,
    Tombstones,
    parse_tombstone,
    unreadable,
)

logger = logging.getLogger(__name__)
ROUND_S = 60.0  # all the small requests of one round together
RETRY_S = 5.0
COLLECT_AGAIN_S = 30.0  # a bucket full of objects too young to delete is not listed all the time
SWEEP_AGAIN_S = 300.0  # a bucket with more suspects than are looked at in one count
AT_ONCE = 16  # footers and tombstones read
FORGED_MAX = 1 << 16


class Upkeep:
    """The task of one daemon. Every number is of the whole bucket, whoever wrote it.

    informed: the tombstones are known. surveyed: the objects are counted. refused: the store
    refused the last round, and waiting does not help. problem, advice: why the last round failed,
    and what to do; "" if it did not.
    """

    def __init__(
        self,
        requests: Requests,
        catalog: Catalog,
        tombstones: Tombstones,
        keys: BucketKeys,
        *,
        settings: ObjectSettings,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._tombstones = tombstones
        self._names = keys.names
        self._keys = keys
        self._forged: set[TombstoneName] = set()  # or of another root: said once
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._wake = asyncio.Event()
        self._collect_at = now()
        self._collected_at = float("-inf")
        self._retry_s = RETRY_S
        self._over_s = COLLECT_AGAIN_S  # to the next count, if the last one left it over its cap
        self._refused_nbytes = 0
        self._sweep: Sweep | None = None  # that goes on at the next count
        self.problem = ""
        self.advice = ""
        self.refused = asyncio.Event()
        self.informed = asyncio.Event()
        self.surveyed = asyncio.Event()
        self.nbytes = 0
        self.objects = 0
        self.namespaces: Set[NamespaceId] = frozenset()  # by the last count
        self._written_nbytes = 0  # by us, ever
        self.run_nbytes_max = 0  # of those that were written, or refused
        self.kept_bytes = 0  # for room, objects are collected down to here at most
        self.is_counted = False  # `nbytes` is known
        self.counted: Callable[[], None] = lambda: None  # called after each count,
        self.short: Callable[[], None] = lambda: None  # or if a run has no room: may set the cap

    @property
    def capacity_bytes(self) -> int:
        """The cap, of all daemons together."""
        return self._settings.capacity_bytes

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap; what is over it is collected soon."""
        self._settings = replace(self._settings, capacity_bytes=nbytes)
        if self.nbytes > self._collected_bytes:
            self.collect_soon(0)

    @property
    def _collected_bytes(self) -> int:
        """What is over this is collected: the cap, or what is to be kept under a lower one."""
        return max(self.capacity_bytes, self.kept_bytes)

    def wrote(self, nbytes: int) -> None:
        """Count bytes of a run that this daemon has written since the last count."""
        self.run_nbytes_max = max(self.run_nbytes_max, nbytes)
        self.nbytes += nbytes
        self._written_nbytes += nbytes
        if self.nbytes > self._collected_bytes:  # the cap was lowered while it was in flight
            self.collect_soon(0)

    def found_room(self, nbytes: int) -> None:
        """Note that a run of `nbytes` may be stored: whoever was refused as much before would be
        let in now, so nothing needs to leave for it."""
        if nbytes >= self._refused_nbytes:
            self._refused_nbytes = 0

    def ask_room(self, nbytes: int) -> None:
        """Let the cap be raised, if others leave room, before a run of `nbytes` is refused."""
        self.run_nbytes_max = max(self.run_nbytes_max, nbytes)
        self.short()

    def collect_soon(self, nbytes: int) -> None:
        """Count and collect soon, because `nbytes` found no room; unless that was just done."""
        self._refused_nbytes = max(self._refused_nbytes, nbytes)
        soon = max(self._now(), self._collected_at + COLLECT_AGAIN_S)
        if soon < self._collect_at:
            self._collect_at = soon
            self._wake.set()

    async def run(self) -> None:
        """Work in rounds until cancelled."""
        while True:
            pause_s = await self._round()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()

    async def _round(self) -> float:
        """Do one round; return how long to wait for the next one."""
        breaker = self._requests.breaker
        try:
            await self.inform()
            await self._collect_if_due()
        except KVStoreError as error:
            if not breaker.closed:
                breaker.probe_failed()
            self._note(error)
            return max(RETRY_S, breaker.retry_after_s)
        except Exception:
            logger.exception("object_tier=bug")
            return self._settings.believed_s
        self._note(None)
        return min(self._settings.believed_s, max(0.0, self._collect_at - self._now()))

    async def _collect_if_due(self) -> None:
        if self._now() < self._collect_at:
            return
        every_s, before = self._settings.collect_every_s, self._sweep
        try:
            await self.collect()
        except KVStoreError:
            # For example without the right to delete: counting in vain costs money.
            self._collect_at = self._now() + self._retry_s
            self._retry_s = min(2 * self._retry_s, every_s)
            raise
        self._retry_s = RETRY_S
        goes_on = self._sweep is not None and self._sweep != before
        pause_s = min(every_s, SWEEP_AGAIN_S) if goes_on else every_s
        # Daemons that started together must not always collect together.
        self._collect_at = self._now() + pause_s * random.uniform(0.5, 1.5)
        if self.objects and self.nbytes > self._collected_bytes:  # lowered meanwhile, or too young
            self._collect_at = min(self._collect_at, self._now() + self._over_s)
            self._over_s = min(2 * self._over_s, every_s)  # to list a large bucket costs money
        else:
            self._over_s = COLLECT_AGAIN_S

    def _note(self, error: KVStoreError | None) -> None:
        """Note how the last round ended, and log a change."""
        before, self.problem = self.problem, str(error or "")
        self.advice = advice(error, self._settings) if error is not None else ""
        if isinstance(error, ObjectRefused):
            self.refused.set()
        else:
            self.refused.clear()
        if error is None and before:
            logger.info("object_tier=ok")
        elif error is not None and not before:
            logger.warning("object_tier=failing reason=%r do=%r", self.problem, self.advice)

    async def inform(self) -> None:
        """Learn the deletes of others: one request, and one for each tombstone not seen before."""
        deadline = self._now() + ROUND_S
        await self._keys.load(deadline)
        page = await self._requests.first_page(self._names.tombstones, deadline, probe=True)
        await self._learn(page)
        if len(page) >= 1000:
            async for more in self._requests.pages(self._names.tombstones):
                await self._learn(more)
        self.informed.set()

    async def _learn(self, page: Iterable[Listed]) -> None:
        names = ((self._names.parse_tombstone(listed.name), listed) for listed in page)
        known = self._tombstones.known.keys() | self._forged
        unknown = [(n, at) for n, at in names if n is not None and n not in known]
        for start in range(0, len(unknown), AT_ONCE):
            batch = [self._fetch(name, at) for name, at in unknown[start : start + AT_ONCE]]
            for tombstone in await asyncio.gather(*batch):
                if tombstone is not None:
                    self._tombstones.add(tombstone)

    async def _fetch(self, name: TombstoneName, listed: Listed) -> Tombstone | None:
        """Return a tombstone, None for one that kills nothing."""
        deadline = self._now() + ROUND_S
        try:
            if not 0 < listed.nbytes <= TOMBSTONE_NBYTES_MAX:
                raise CorruptBlock(f"a tombstone of {listed.nbytes} bytes")
            data = await self._requests.fetch(str(name), 0, listed.nbytes, deadline)
            key = await self._keys.key_of(name, data[-PAGE_NBYTES:], deadline)
            return parse_tombstone(name, listed.modified, data, self._names, key)
        except ObjectGone as error:
            # It may have been deleted since it was listed: then the next round does not see it. In
            # any other case, a delete must not be overlooked.
            raise ObjectFailed("a tombstone is listed, and not there", reason="gone") from error
        except CorruptBlock as error:
            if isinstance(self._names, SealedNames):
                self._ignore(name, error)
                return None
            logger.warning("tombstone=unreadable kills=namespace reason=%r", str(error))
            return unreadable(name, listed.modified)

    def _ignore(self, name: TombstoneName, error: CorruptBlock) -> None:
        """Count a tombstone that does not open: whoever may write to the bucket can put one."""
        self._metrics.corrupt_blocks.labels("object").inc()
        logger.warning("tombstone=unreadable kills=nothing reason=%r", str(error))
        if len(self._forged) < FORGED_MAX:
            self._forged.add(name)

    async def collect(self) -> None:
        """Count everything and delete objects that are too old, over the cap, or hold deleted
        blocks."""
        now = await self._store_time()
        before = self._written_nbytes
        buried = dict(self._tombstones.known)
        sweep = self._sweep or Sweep(self._ripe(buried.values(), now))
        survey = Survey(
            lambda e: self._tombstones.may_kill(e.name.namespace_id, e.modified),
            self._names,
            after=sweep.after,
        )
        async for page in self._requests.pages(self._names.prefix.rstrip("/")):
            survey.add(page)
        await self._learn(survey.tombstones.values())
        meanwhile = [name for name in self._tombstones.known if name not in buried]
        self._tombstones.keep([*survey.tombstones, *meanwhile])
        self.nbytes = survey.nbytes + self._written_nbytes - before
        self.is_counted = True
        self.counted()
        victims = survey.victims(
            now,
            capacity_bytes=self._collected_bytes,
            max_age_s=self._settings.max_age_s,
            grace_s=self._settings.grace_s,
            room_nbytes=self._refused_nbytes,
        )
        doomed = {victim.entry: victim.reason for victim in victims}
        are_read = await self._suspect(survey.suspects, doomed)
        left = survey.nbytes - await self._delete(doomed)
        if are_read:
            self._sweep = survey.swept(sweep)
            if self._sweep is None:
                await self._unbury(sweep.ripe)
        self.nbytes = left + self._written_nbytes - before
        self.objects = survey.objects - len(doomed)
        self.namespaces = await self._real(survey.namespaces)
        self._refused_nbytes = 0
        self._collected_at = self._now()
        self.surveyed.set()

    async def _real(self, named: Mapping[NamespaceId, Entry]) -> Set[NamespaceId]:
        """Return namespaces by their own ids. Where names are digests, an object of each tells it,
        once."""
        unknown = [entry for each, entry in named.items() if self._names.real(each) is None]
        for start in range(0, len(unknown), AT_ONCE):
            await asyncio.gather(*map(self._is_dead, unknown[start : start + AT_ONCE]))
        found = map(self._names.real, named)
        return frozenset(each for each in found if each is not None)

    async def _store_time(self) -> float:
        deadline = self._now() + ROUND_S
        await self._requests.put(self._names.clock, [b"kvstore\n"], 8, deadline)
        return (await self._requests.head(self._names.clock, deadline)).modified

    async def _suspect(self, suspects: Sequence[Entry], doomed: dict[Entry, str]) -> bool:
        """Add the objects that hold deleted blocks to `doomed`. False: not all could be read."""
        complete = True
        for start in range(0, len(suspects), AT_ONCE):
            batch = suspects[start : start + AT_ONCE]
            dead = await asyncio.gather(*map(self._is_dead, batch))
            doomed |= {e: "deleted" for e, is_dead in zip(batch, dead, strict=True) if is_dead}
            complete &= None not in dead
        return complete

    async def _is_dead(self, entry: Entry) -> bool | None:
        """Return whether an object holds a deleted block; None: it could not be read now."""
        try:
            run = self._catalog.run(entry.name)
            if run is None:
                deadline = self._now() + ROUND_S
                run = await fetch_footer(self._requests, entry, deadline, self._keys)
        except (CorruptBlock, ObjectGone):
            return False  # no daemon serves it
        except KVStoreError:
            return None
        return self._tombstones.kills_any(entry.name.namespace_id, run.keys, entry.modified)

    async def _delete(self, doomed: dict[Entry, str]) -> int:
        """Delete objects; return their bytes."""
        await self._requests.delete([str(e.name) for e in doomed], self._now() + ROUND_S)
        for entry, reason in doomed.items():
            self._catalog.gone(entry.name)
            self._metrics.object_collected.labels(reason).inc()
        if doomed:
            logger.info("object_tier=collected objects=%d", len(doomed))
        return sum(entry.nbytes for entry in doomed)

    def _ripe(self, buried: Iterable[Tombstone], now: float) -> tuple[TombstoneName, ...]:
        """Return the tombstones that a sweep may end.

        Not before the grace period is over: until then, an older upload may still end.
        """
        return tuple(t.name for t in buried if now - t.modified > self._settings.grace_s)

    async def _unbury(self, dead: Sequence[TombstoneName]) -> None:
        """Delete the tombstones that have nothing left to kill."""
        await self._requests.delete(list(map(str, dead)), self._now() + ROUND_S)
        self._tombstones.keep(set(self._tombstones.known) - set(dead))
