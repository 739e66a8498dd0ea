"""Store runs, one object each, within the bucket's cap and the bound on bytes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from kvstore.format.frame import FrameHeader
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import CorruptBlock, InvalidRequest, Unavailable
from kvstore.settings import ObjectSettings
from kvstore.tier.object.budget import ByteBudget
from kvstore.tier.object.catalog import UNKNOWN_TIME, Catalog, Entry
from kvstore.tier.object.failure import ObjectExists, ObjectFailed
from kvstore.tier.object.footers import fetch_footer
from kvstore.tier.object.keys import BucketKeys
from kvstore.tier.object.layout import Run, lay_out, name_sealed, seal_run
from kvstore.tier.object.names import RunName
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.seal import SealedNames
from kvstore.tier.object.tombstones import Tombstones
from kvstore.tier.object.upkeep import Upkeep


class Writes:
    """Stores runs. Refused writes are counted by their reason."""

    def __init__(
        self,
        requests: Requests,
        catalog: Catalog,
        tombstones: Tombstones,
        upkeep: Upkeep,
        keys: BucketKeys,
        *,
        settings: ObjectSettings,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._tombstones = tombstones
        self._upkeep = upkeep
        self._keys = keys
        self._names = keys.names
        self._grace_s = settings.grace_s
        self._metrics = metrics
        self._now = now
        self._budget = ByteBudget(settings.in_flight_bytes_max)
        self._writing: dict[asyncio.Future[None], Run] = {}

    @property
    def in_flight_nbytes(self) -> int:
        return self._budget.held_nbytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes in the bucket by the last count, plus bytes this daemon has written since or has in
        flight."""
        return self._upkeep.nbytes + self._budget.held_nbytes

    async def write(
        self, frames: Sequence[tuple[FrameHeader, Sequence[memoryview]]], deadline: float
    ) -> Run:
        """Store frames of one run as one object; return what and where it is.

        Each frame: its header (sequence and place are the tier's to choose) and its blocks' stored
        bytes, padded to whole pages. The buffers stay untouched until this returns. Waits while too
        many bytes are in flight. The name is a digest of the content, so two daemons that write the
        same bytes at once write the same object.

        Raises InvalidRequest, or Unavailable (no room, no answer); then it may or may not be
        stored.
        """
        for header, payload in frames:
            if PAGE_NBYTES + sum(buffer.nbytes for buffer in payload) != header.nbytes:
                raise InvalidRequest("the payload has another size than its header says")
        headers, payloads = [header for header, _ in frames], [payload for _, payload in frames]
        with self._counted_refusals():
            if isinstance(self._names, SealedNames):
                return await self._write_sealed(
                    name_sealed(headers, self._names), payloads, deadline
                )
            run, pages, footer = lay_out(headers)
            buffers: list[memoryview] = []
            for page, payload in zip(pages, payloads, strict=True):
                buffers += [memoryview(page), *payload]
            if not self._is_stored(run):
                async with self._in_flight(run, deadline) as until:
                    buffers.append(memoryview(footer))
                    await self._requests.put(str(run.name), buffers, run.nbytes, until)
                    await self._note(run, until)
        return run

    async def _write_sealed(
        self, run: Run, payloads: Sequence[Sequence[memoryview]], deadline: float
    ) -> Run:
        """Return the run that is stored: it may be another daemon's, with a key of its own."""
        if self._is_stored(run):
            return self._catalog.run(run.name) or run
        async with self._in_flight(run, deadline) as until:
            sealed, buffers = await asyncio.to_thread(seal_run, run, payloads)
            if await self._put_absent(sealed, buffers, until):
                await self._note(sealed, until)
                return sealed
            return await self._stored(sealed, buffers, until)

    def _is_stored(self, run: Run) -> bool:
        """Say whether a run is known to be there, with nothing of it wrong, or deleted since."""
        entry = self._catalog.entry(run.name)
        if entry is None or self._catalog.wrong(run.name):
            return False
        return not self._is_dead(run, entry.modified)

    def _is_dead(self, run: Run, modified: float) -> bool:
        """Say whether anything is deleted of a run that was stored then."""
        return self._tombstones.kills_any(run.name.namespace_id, run.keys, modified)

    @asynccontextmanager
    async def _in_flight(self, run: Run, deadline: float) -> AsyncIterator[float]:
        """Count a run that is being stored, and yield until when it may be."""
        deadline = min(deadline, self._now() + self._grace_s / 2)
        self._check_room(run, ahead_nbytes=run.nbytes)
        # Counted before the first await: a delete either waits for it, or is known by then.
        with self._counted(run):
            async with self._budget.take(run.nbytes, deadline - self._now()):
                self._check_room(run, ahead_nbytes=0)  # it is among the bytes in flight now
                yield deadline

    async def _note(self, run: Run, deadline: float) -> None:
        """Note a run that this daemon has stored."""
        self._upkeep.wrote(run.nbytes)
        self._catalog.written(run, await self._modified(run.name, deadline))

    async def _put_absent(self, run: Run, buffers: Sequence[memoryview], deadline: float) -> bool:
        """Store an encrypted object; False if there is one of its name, with a key of its own."""
        try:
            await self._requests.put(str(run.name), buffers, run.nbytes, deadline, absent=True)
        except ObjectExists:
            return False
        return True

    async def _stored(self, run: Run, buffers: Sequence[memoryview], deadline: float) -> Run:
        """Return the run that was there first; ours takes its place if it does not open, or if
        something of it is deleted, or wrong."""
        found = await self._found(run.name, deadline)
        if found is None:
            await self._requests.put(str(run.name), buffers, run.nbytes, deadline)
            self._upkeep.wrote(run.nbytes)
            self._catalog.gone(run.name)  # as it was
            # Another daemon may have done the same meanwhile: the key of the last one opens it.
            found = await self._found(run.name, deadline)
        return found or run

    async def _found(self, name: RunName, deadline: float) -> Run | None:
        """Return the run in an object that is there, and note it; None if it does not open, or if
        something of it is deleted, or wrong."""
        listed = await self._requests.head(str(name), deadline)
        entry = Entry(name, listed.nbytes, listed.modified)
        try:
            run = await fetch_footer(self._requests, entry, deadline, self._keys)
        except CorruptBlock:
            return None
        if self._catalog.wrong(name, entry.modified) or self._is_dead(run, entry.modified):
            return None
        self._catalog.written(run, entry.modified)
        return run

    async def _modified(self, name: RunName, deadline: float) -> float:
        """Return when an object of ours was stored, if a tombstone has to be compared with it.

        Otherwise it counts as old: a later tombstone kills it here too, and the next listing has
        its true time.
        """
        if not self._tombstones.any_in(name.namespace_id):
            return UNKNOWN_TIME
        return (await self._requests.head(str(name), deadline)).modified

    def _check_room(self, run: Run, *, ahead_nbytes: int) -> None:
        if not self._upkeep.surveyed.is_set():
            raise ObjectFailed("the bucket is not counted yet", reason="unsurveyed")
        wanted = self.physical_nbytes + ahead_nbytes
        if wanted > self._upkeep.capacity_bytes:
            self._upkeep.ask_room(run.nbytes)
        if wanted > self._upkeep.capacity_bytes:
            self._upkeep.collect_soon(run.nbytes)
            raise ObjectFailed("the bucket is at its cap", reason="full")
        if ahead_nbytes:  # else it was let in before somebody else was refused
            self._upkeep.found_room(run.nbytes)

    def under_way(
        self, namespace_id: NamespaceId, keys: set[BlockKey] | None
    ) -> list[asyncio.Future[None]]:
        """Return the writes in flight of any of `keys`, or (None) of the namespace, by its id in
        names."""
        return [done for done, run in self._writing.items() if run.holds(namespace_id, keys)]

    @contextmanager
    def _counted(self, run: Run) -> Iterator[None]:
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
