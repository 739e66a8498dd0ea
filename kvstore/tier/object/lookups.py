"""Look up a prefix in the bucket: each listing and footer is requested once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import CorruptBlock, Unavailable
from kvstore.tier.object.catalog import Catalog, Directory, Entry
from kvstore.tier.object.failure import ObjectGone
from kvstore.tier.object.footers import fetch_footer
from kvstore.tier.object.keys import BucketKeys
from kvstore.tier.object.names import Listed
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.tombstones import Tombstones
from kvstore.tier.object.walk import Found, Walk, Wanted

logger = logging.getLogger(__name__)


class Lookups:
    """Lookups that need the same listing or footer share the request.

    informed: set as soon as it is known what was deleted; nothing is found before. timeout_s: of
    one request; a listing or footer has twice as long, retries included.
    """

    def __init__(
        self,
        requests: Requests,
        catalog: Catalog,
        tombstones: Tombstones,
        keys: BucketKeys,
        *,
        informed: asyncio.Event,
        timeout_s: float,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._tombstones = tombstones
        self._keys = keys
        self._names = keys.names
        self._informed = informed
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._now = now
        self._shared: dict[Directory | Entry, asyncio.Task[None]] = {}

    async def find(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        run_blocks: int,
        deadline: float,
    ) -> Found:
        """Return the part of a prefix in the bucket that was found by the deadline.

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
        copies: bool = False,
    ) -> AsyncIterator[Found]:
        """Yield the part of a prefix that was found so far, while the rest is requested. The last
        result has everything found by the deadline.

        keys[0]: the first block of the prefix, or one at a multiple of `run_blocks`. Never raises
        if the store fails: then less is found, and the result is marked as not complete. copies:
        as for `Walk`.
        """
        if not self._informed.is_set():
            yield Found(0, (), complete=False)
            return
        walk = Walk(
            namespace_id,
            keys,
            run_blocks,
            self._catalog,
            self._tombstones,
            names=self._names,
            copies=copies,
        )
        asked: dict[Directory | Entry, asyncio.Task[None]] = {}
        told = 0
        while not walk.ended:
            wanted = walk.step()
            if wanted == Wanted():
                await asyncio.sleep(0)  # a long prefix, all of it known: give other tasks a turn
                continue
            for each in (*wanted.now, *wanted.ahead):
                asked[each] = asked.get(each) or self._ask(each)
            if walk.position > told:
                told = walk.position
                yield walk.found(complete=False)
                continue  # the requests may be answered by now
            answered = all(asked[each].done() for each in wanted.now)
            timeout_s = deadline - self._now()
            if answered or timeout_s <= 0:  # it was requested, and there was no answer
                yield walk.found(complete=False)
                return
            pending = [task for task in asked.values() if not task.done()]
            await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        yield walk.found(complete=True)

    def _ask(self, wanted: Directory | Entry) -> asyncio.Task[None]:
        """Return the task of a request. It goes on if a caller stops waiting for it."""
        task = self._shared.get(wanted)
        if task is None:
            work = self._read_footer(wanted) if isinstance(wanted, Entry) else self._list(wanted)
            task = asyncio.get_running_loop().create_task(self._quietly(work))
            self._shared[wanted] = task
            task.add_done_callback(lambda _: self._shared.pop(wanted))
        return task

    async def _quietly(self, work: Awaitable[None]) -> None:
        with suppress(Unavailable):  # `requests` has counted it; the catalog stays without an entry
            await work

    async def _list(self, wanted: Directory) -> None:
        place = self._names.directory(*wanted)
        page = await self._requests.first_page(place, self._deadline())
        entries = map(self._entry, page)
        self._catalog.listed(wanted, [e for e in entries if e and e.directory == wanted])

    async def _read_footer(self, entry: Entry) -> None:
        try:
            run = await fetch_footer(self._requests, entry, self._deadline(), self._keys)
        except ObjectGone:
            self._catalog.gone(entry.name)
        except CorruptBlock as error:
            self._metrics.corrupt_blocks.labels("object").inc()
            logger.warning("object=corrupt reason=%r", str(error))
            self._catalog.read(entry, None)
        else:
            self._catalog.read(entry, run)

    def _deadline(self) -> float:
        return self._now() + 2 * self._timeout_s

    async def close(self) -> None:
        """Stop every request under way."""
        tasks = list(self._shared.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _entry(self, listed: Listed) -> Entry | None:
        name = self._names.parse_run(listed.name)
        return Entry(name, listed.nbytes, listed.modified) if name is not None else None
