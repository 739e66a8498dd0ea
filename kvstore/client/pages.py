"""Pages of an engine's host memory to and from the daemon: one copy each way, by our threads.

For connectors whose engines name pages one by one, and want an answer within a deadline. All of it
runs on the loop of a `kvstore.Client`. A page is not the engine's again before nothing reads or
writes it any more: so nothing here ends while a copy runs, or a disk may still fill a page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.client.async_client import AsyncClient
from kvstore.client.lookup_lease import LookupLeases
from kvstore.client.page_counters import Counters
from kvstore.client.pieces import Memory
from kvstore.model.block import BlockKey, Namespace
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.system.threads import outlive

logger = logging.getLogger(__name__)

KEYS_MAX = 1024  # of one lease; the client cuts it further where a daemon takes less
STALL_S = 0.25  # of a load without an end: is the daemon still there?
ANSWER_S = 0.5  # to a ping, by a daemon that is busy


class Place(NamedTuple):
    """Where a page is stored."""

    namespace: Namespace
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Position:
    """Where a page stands in its prefix: after how many pages, and after which."""

    index: int
    parent: BlockKey | None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an engine waits, and what it may store.

    lookup_deadline_s: for a lookup. After that all of it is a miss, and nothing is asked until the
        daemon has answered a ping.
    load_deadline_s: until pages are there; those that are not are misses.
    save_deadline_s: for room in the daemon; what finds none is not stored. Nor is what is not there
        a moment later.
    page_nbytes_max: of one page.
    from_files: pages that only the file tier has are read from the disk into the engine's memory,
        where they are whole pages of the processor's; a disk that hangs then holds them.
    """

    lookup_deadline_s: float
    load_deadline_s: float
    save_deadline_s: float
    page_nbytes_max: int
    from_files: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages of one namespace. at: which pages of the whole task they are. first: where they begin,
    of pages that follow each other."""

    namespace: Namespace
    keys: list[BlockKey]
    at: list[int]
    first: Position


class Pages:
    """Moves pages for one engine."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters
        self._leases = LookupLeases()

    async def exist(self, remote: AsyncClient, places: Sequence[Place | None]) -> list[bool]:
        """Say which pages are stored. None of them, if the daemon does not answer in time.

        What is there from the first page on is leased for a moment: a load may follow.
        """
        found = [False] * len(places)

        async def look(batch: Batch) -> None:
            namespace_id = await remote.register(batch.namespace, now=False)
            present, lease = await remote.look_up(
                namespace_id, batch.keys, from_files=self._limits.from_files
            )
            if lease is not None:
                self._leases.keep(remote, lease)
            for at, there in zip(batch.at, present, strict=True):
                found[at] = there

        self._counters.add("looked_up", len(places))
        try:
            async with asyncio.timeout(self._limits.lookup_deadline_s):
                await _together([look(batch) for batch in _batches(places)])
        except TimeoutError:
            await remote.doubt()
            self._counters.refuse("late", len(places), "the daemon did not answer a lookup")
            return [False] * len(places)
        self._counters.add("hits", sum(found))
        return found

    async def load(
        self, remote: AsyncClient, places: Sequence[Place | None], pages: Sequence[Memory]
    ) -> list[bool]:
        """Fill pages; say which hold what was stored. The others' bytes are undefined.

        Only a record that is as long as its page is one.
        """
        loaded = [False] * len(places)
        deadline_s = self._limits.load_deadline_s

        async def take(batch: Batch) -> None:
            targets = [pages[at] for at in batch.at]
            namespace_id = await remote.register(batch.namespace, now=False)
            good = await remote.get_into(
                namespace_id,
                batch.keys,
                targets,
                wait_s=deadline_s,
                from_files=self._limits.from_files,
                lease=self._leases.take(namespace_id, batch.keys),
            )
            for at, is_good in zip(batch.at, good, strict=True):
                loaded[at] = is_good

        self._counters.add("loads", len(places))
        fitting = self._fitting(places, pages)
        work = _together([take(batch) for batch in _batches(fitting)])
        try:
            if not await self._watched(remote, work, deadline_s):
                raise Unavailable("the daemon did not move pages in time")
        except BaseException:
            await remote.settled()
            raise
        self._counters.add("loaded", sum(loaded))
        return loaded

    async def save(
        self,
        remote: AsyncClient,
        places: Sequence[Place | None],
        pages: Sequence[Memory],
        positions: Sequence[Position] = (),
    ) -> list[bool]:
        """Store pages; say which are stored now. Of a batch that found no room, none counts.

        positions: of each page, if the engine tells; else they count as the start of a prefix.
        """
        saved = [False] * len(places)
        unanswered = 0
        deadline_s = self._limits.save_deadline_s

        async def put(batch: Batch) -> None:
            nonlocal unanswered
            records = [pages[at] for at in batch.at]
            namespace_id = await remote.register(batch.namespace, now=False)
            done = await remote.put(
                namespace_id,
                batch.keys,
                records,
                first_block=batch.first.index,
                parent=batch.first.parent,
                wait_s=deadline_s,
            )
            self._counters.refuse("no_room", done.refused, "the daemon has no room")
            unanswered -= len(batch.at)
            for at in batch.at:
                saved[at] = not done.refused

        self._counters.add("saves", len(places))
        fitting = self._fitting(places, pages)
        batches = _batches(fitting, positions, once=True)
        unanswered = sum(len(batch.at) for batch in batches)
        work = _together([put(batch) for batch in batches])
        # Nobody waits for it, and to wait for room is no reason to ask.
        if not await self._watched(remote, work, deadline_s, ask=False):
            self._counters.refuse("late", unanswered, "the daemon did not take pages in time")
        where = {place: saved[at] for at, place in enumerate(fitting) if place and saved[at]}
        self._counters.add("saved", sum(saved))
        return [place in where for place in fitting]

    async def delete(self, remote: AsyncClient, places: Sequence[Place | None]) -> list[bool]:
        """Delete pages of this daemon, which may go on to have copies elsewhere."""
        deleted = [False] * len(places)

        async def drop(batch: Batch) -> None:
            namespace_id = await remote.register(batch.namespace, now=False)
            await remote.connect()
            most = remote.batch_keys_max
            for first in range(0, len(batch.keys), most):
                some = slice(first, first + most)
                await remote.admin.delete(namespace_id, batch.keys[some], this_daemon_only=True)
                for at in batch.at[some]:
                    deleted[at] = True

        await _together([drop(batch) for batch in _batches(places)])
        self._counters.add("deleted", sum(deleted))
        return deleted

    def _fitting(
        self, places: Sequence[Place | None], pages: Sequence[Memory]
    ) -> list[Place | None]:
        """Leave out pages that cannot be stored."""
        most = self._limits.page_nbytes_max
        fits = [
            place if 0 < page.nbytes <= most else None
            for place, page in zip(places, pages, strict=True)
        ]
        refused = fits.count(None) - list(places).count(None)
        self._counters.refuse("too_large", refused, f"a page has 1 to {most} bytes here")
        return fits

    async def _watched(
        self,
        remote: AsyncClient,
        work: Coroutine[Any, Any, None],
        deadline_s: float,
        *,
        ask: bool = True,
    ) -> bool:
        """Wait for work that may take long. Past the deadline, and before it if `ask`, see whether
        the daemon answers.

        Returns False past the deadline, and raises Unavailable if the daemon does not answer: when
        the work has ended all the same.
        """
        task = asyncio.ensure_future(work)
        until = asyncio.get_running_loop().time() + deadline_s + STALL_S
        try:
            while not (await asyncio.wait([task], timeout=STALL_S))[0]:
                late = asyncio.get_running_loop().time() >= until
                if (late or ask) and not await _answers(remote):
                    await remote.doubt()
                    raise Unavailable("the daemon did not move pages in time")
                if late and not task.done():
                    return False
        finally:
            if not task.done():
                task.cancel()
                await outlive([task])
        task.result()
        return True


async def connect(remote: AsyncClient) -> None:
    """Connect before anybody asks: a first lookup has no time for it."""
    try:
        await remote.connect()
    except KVStoreError as error:
        logger.warning("daemon=away reason=%r", str(error))


def kind_of(error: KVStoreError) -> str:
    """Return how a failed call is counted."""
    return "away" if isinstance(error, Unavailable) else "failed"


async def _answers(remote: AsyncClient) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            await remote.admin.ping()
    except (TimeoutError, KVStoreError):
        return False
    return True


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run jobs until all have ended, whatever becomes of one; then raise what the first raised."""
    if len(jobs) == 1:
        await jobs[0]
        return
    for outcome in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _batches(
    places: Sequence[Place | None], positions: Sequence[Position] = (), *, once: bool = False
) -> list[Batch]:
    """Sort pages by namespace, in order, as many as a call takes. once: no page twice."""
    batches: list[Batch] = []
    batch: Batch | None = None
    current: dict[Namespace, Batch] = {}
    seen: set[Place] = set()
    for at, place in enumerate(places):
        if place is None or (once and place in seen):
            continue
        if once:
            seen.add(place)
        if batch is None or batch.namespace is not place.namespace:  # hashing it takes longer
            batch = current.get(place.namespace)
        if batch is None or not _takes(batch, positions[at] if positions else None):
            first = positions[at] if positions else Position(0, None)
            batch = current[place.namespace] = Batch(place.namespace, [], [], first)
            batches.append(batch)
        batch.keys.append(place.key)
        batch.at.append(at)
    return batches


def _takes(batch: Batch, position: Position | None) -> bool:
    """Say whether a batch takes one page more."""
    count = len(batch.keys)
    follows = position is None or position.index == batch.first.index + count
    return count < KEYS_MAX and follows
