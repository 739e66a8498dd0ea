"""Pages of LMCache's host memory to and from the daemon: one copy each way, by our threads.

All of it runs on the loop of a `kvstore.Client`. A page is not LMCache's again before nothing reads
or writes it any more: so nothing here ends while a copy runs, or a disk may still fill a page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore import AsyncClient, BlockKey, KVStoreError, Namespace, Unavailable
from kvstore.client.session import registered
from kvstore.system.threads import outlive
from kvstore_lmcache.counters import Counters
from kvstore_lmcache.names import Place
from kvstore_lmcache.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEYS_MAX = 1024  # of one call
STALL_S = 0.25  # of a load without an end: is the daemon still there?
ANSWER_S = 0.5  # to a ping, by a daemon that is busy


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages of one namespace. at: which pages of the whole task they are."""

    namespace: Namespace
    keys: list[BlockKey]
    at: list[int]


class Pages:
    """Moves pages for one LMCache."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters

    async def exist(self, remote: AsyncClient, places: Sequence[Place | None]) -> list[bool]:
        """Say which pages are stored. None of them, if the daemon does not answer in time."""
        found = [False] * len(places)

        async def look(batch: Batch) -> None:
            namespace_id = await registered(remote, batch.namespace)
            match = await remote.match(namespace_id, batch.keys, each=True)
            for at, there in zip(batch.at, match.present, strict=True):
                found[at] = there

        self._counters.add("looked_up", len(places))
        try:
            async with asyncio.timeout(self._settings.lookup_deadline_s):
                await _together([look(batch) for batch in _batches(places)])
        except TimeoutError:
            await remote.doubt()
            self._counters.refuse("late", len(places), "the daemon did not answer a lookup")
            return [False] * len(places)
        self._counters.add("hits", sum(found))
        return found

    async def load(
        self, remote: AsyncClient, places: Sequence[Place | None], pages: Sequence[memoryview]
    ) -> list[bool]:
        """Fill pages; say which hold what was stored. The others' bytes are undefined.

        Only a record that is as long as its page is one.
        """
        loaded = [False] * len(places)
        deadline_s = self._settings.load_deadline_s

        async def take(batch: Batch) -> None:
            targets = [pages[at] for at in batch.at]
            namespace_id = await registered(remote, batch.namespace)
            good = await remote.get_into(
                namespace_id, batch.keys, targets, wait_s=deadline_s, from_files=True
            )
            for at, is_good in zip(batch.at, good, strict=True):
                loaded[at] = is_good

        self._counters.add("loads", len(places))
        fitting = self._fitting(places, pages)
        try:
            await self._watched(
                remote, _together([take(batch) for batch in _batches(fitting)]), deadline_s
            )
        except BaseException:
            await remote.settled()
            raise
        self._counters.add("loaded", sum(loaded))
        return loaded

    async def save(
        self, remote: AsyncClient, places: Sequence[Place | None], pages: Sequence[memoryview]
    ) -> list[bool]:
        """Store pages; say which are stored now. Of a batch that found no room, none counts."""
        saved = [False] * len(places)
        deadline_s = self._settings.save_deadline_s

        async def put(batch: Batch) -> None:
            records = [pages[at] for at in batch.at]
            namespace_id = await registered(remote, batch.namespace)
            done = await remote.put(namespace_id, batch.keys, records, wait_s=deadline_s)
            self._counters.refuse("no_room", done.refused, "the daemon has no room")
            for at in batch.at:
                saved[at] = not done.refused

        self._counters.add("saves", len(places))
        fitting = self._fitting(places, pages)
        work = _together([put(batch) for batch in _batches(fitting, once=True)])
        await self._watched(remote, work, deadline_s, ask=False)  # nobody waits for it
        where = {place: saved[at] for at, place in enumerate(fitting) if place and saved[at]}
        self._counters.add("saved", sum(saved))
        return [place in where for place in fitting]

    async def delete(self, remote: AsyncClient, places: Sequence[Place | None]) -> list[bool]:
        """Delete pages of this daemon, which may go on to have copies elsewhere."""
        deleted = [False] * len(places)

        async def drop(batch: Batch) -> None:
            namespace_id = await registered(remote, batch.namespace)
            await remote.admin.delete(namespace_id, batch.keys, this_daemon_only=True)
            for at in batch.at:
                deleted[at] = True

        await _together([drop(batch) for batch in _batches(places)])
        self._counters.add("deleted", sum(deleted))
        return deleted

    def _fitting(
        self, places: Sequence[Place | None], pages: Sequence[memoryview]
    ) -> list[Place | None]:
        """Leave out pages that cannot be stored."""
        most = self._settings.page_mib_max << 20
        fits = [0 < page.nbytes <= most for page in pages]
        self._counters.refuse(
            "too_large", fits.count(False), f"page_mib_max={self._settings.page_mib_max}"
        )
        return [place if fit else None for place, fit in zip(places, fits, strict=True)]

    async def _watched(
        self, remote: AsyncClient, work: Awaitable[T], deadline_s: float, *, ask: bool = True
    ) -> T:
        """Wait for work that may take long; if it does, and `ask`, see whether the daemon answers.

        Raises Unavailable if not, and past the deadline: when the work has ended all the same.
        """
        task = asyncio.ensure_future(work)
        until = asyncio.get_running_loop().time() + deadline_s + STALL_S
        try:
            while not (await asyncio.wait([task], timeout=STALL_S))[0]:
                late = asyncio.get_running_loop().time() >= until
                if late or (ask and not await _answers(remote)):
                    await remote.doubt()
                    raise Unavailable("the daemon did not move pages in time")
        finally:
            if not task.done():
                task.cancel()
                await outlive([task])
        return task.result()


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
    for outcome in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _batches(places: Sequence[Place | None], *, once: bool = False) -> list[Batch]:
    """Sort pages by namespace, in order, as many as a call takes. once: no page twice."""
    batches: list[Batch] = []
    current: dict[Namespace, Batch] = {}
    seen: set[Place] = set()
    for at, place in enumerate(places):
        if place is None or (once and place in seen):
            continue
        seen.add(place)
        batch = current.get(place.namespace)
        if batch is None or len(batch.keys) >= KEYS_MAX:
            batch = current[place.namespace] = Batch(place.namespace, [], [])
            batches.append(batch)
        batch.keys.append(place.key)
        batch.at.append(at)
    return batches
