"""Store runs, one object each, within the bucket's cap and the bound on bytes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.format.frame import FrameHeader
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.settings import ObjectSettings
from kvstore.tier.object.budget import ByteBudget
from kvstore.tier.object.catalog import Catalog
from kvstore.tier.object.failure import ObjectFailed
from kvstore.tier.object.layout import Run, lay_out
from kvstore.tier.object.names import RunName
from kvstore.tier.object.requests import Requests
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
        *,
        settings: ObjectSettings,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._tombstones = tombstones
        self._upkeep = upkeep
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
        run, pages, footer = lay_out([header for header, _ in frames])
        buffers: list[memoryview] = []
        for page, (header, payload) in zip(pages, frames, strict=True):
            if PAGE_NBYTES + sum(buffer.nbytes for buffer in payload) != header.nbytes:
                raise InvalidRequest("the payload has another size than its header says")
            buffers += [memoryview(page), *payload]
        with self._counted_refusals():
            if not self._catalog.has(run.name):
                deadline = min(deadline, self._now() + self._grace_s / 2)
                await self._store(run, [*buffers, memoryview(footer)], deadline)
        return run

    async def _store(self, run: Run, buffers: Sequence[memoryview], deadline: float) -> None:
        self._check_room(run, ahead_nbytes=run.nbytes)
        # Counted before the first await: a delete either waits for it, or is known by then.
        with self._counted(run):
            async with self._budget.take(run.nbytes, deadline - self._now()):
                self._check_room(run, ahead_nbytes=0)  # it is among the bytes in flight now
                await self._requests.put(str(run.name), buffers, run.nbytes, deadline)
                self._upkeep.wrote(run.nbytes)
                self._catalog.written(run, await self._modified(run.name, deadline))

    async def _modified(self, name: RunName, deadline: float) -> float:
        """Return when an object of ours was stored, if a tombstone has to be compared with it.

        Otherwise it counts as old: a later tombstone kills it here too, and the next listing has
        its true time.
        """
        if not self._tombstones.any_in(name.namespace_id):
            return 0.0
        return (await self._requests.head(str(name), deadline)).modified

    def _check_room(self, run: Run, *, ahead_nbytes: int) -> None:
        if not self._upkeep.surveyed.is_set():
            raise ObjectFailed("the bucket is not counted yet", reason="unsurveyed")
        if self.physical_nbytes + ahead_nbytes > self._upkeep.capacity_bytes:
            self._upkeep.collect_soon(run.nbytes)
            raise ObjectFailed("the bucket is at its cap", reason="full")

    def under_way(
        self, namespace_id: NamespaceId, keys: set[BlockKey] | None
    ) -> list[asyncio.Future[None]]:
        """Return the writes in flight of any of `keys`, or (None) of the namespace."""
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
