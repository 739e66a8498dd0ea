"""Read records of runs: many in one request, with a callback when a record is complete."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

from kvstore.model.errors import Unavailable
from kvstore.system.threads import outlive
from kvstore.tier.object.catalog import Catalog, Record
from kvstore.tier.object.failure import ObjectGone
from kvstore.tier.object.layout import ObjectExtent
from kvstore.tier.object.names import Names
from kvstore.tier.object.ranges import (
    ObjectRead,
    Request,
    is_sealed,
    opened,
    plan_requests,
)
from kvstore.tier.object.requests import Filled, Requests


class Outcome(Enum):
    """The outcome of a read."""

    READ = "read"
    GONE = "gone"  # the object was collected: a miss
    FAILED = "failed"  # could not be read now


class Reads:
    """Reads records, and takes objects that are gone out of the catalog."""

    def __init__(self, requests: Requests, catalog: Catalog, names: Names) -> None:
        self._requests = requests
        self._catalog = catalog
        self._names = names

    async def read(self, reads: Sequence[ObjectRead], deadline: float) -> list[Outcome]:
        """Fill the targets of `reads`; return the outcome of each.

        Bytes are not verified here. The targets belong to the tier until this returns, cancelled or
        not. Those of a read that was not READ are unspecified. Of an encrypted object, a record
        with a wrong tag leaves zeros.
        """
        reads = [replace(read, then=opened(read)) if is_sealed(read) else read for read in reads]
        requests = plan_requests(reads)
        spread = Counter(read for request in requests for read in set(request.reads))
        thens = {index: read.then for index, read in enumerate(reads) if read.then is not None}

        def told(request: Request, index: int) -> None:
            read = request.ends(index)
            if read >= 0 and spread[read] == 1 and (then := thens.get(read)) is not None:
                then()

        jobs = (self._fetch(request, partial(told, request), deadline) for request in requests)
        results = await asyncio.gather(*jobs, return_exceptions=True)  # returns when all have ended
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

    def spoil(self, extent: ObjectExtent, records: Iterable[Record]) -> None:
        """Note that records of an object are not what was stored: no lookup finds them again until
        the object is stored anew."""
        name = self._names.parse_run(extent.name)
        if name is not None:
            self._catalog.spoil(name, records)

    async def _fetch(self, request: Request, told: Filled, deadline: float) -> Outcome:
        try:
            await self._requests.get(request.name, request.start, request.buffers, deadline, told)
        except ObjectGone:
            name = self._names.parse_run(request.name)
            if name is not None:
                self._catalog.gone(name)
            return Outcome.GONE
        except Unavailable:
            return Outcome.FAILED
        return Outcome.READ


async def _finish(then: Callable[[], None]) -> None:
    """Run `then` in a thread, and wait for its end even if cancelled."""
    work = asyncio.ensure_future(asyncio.to_thread(then))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await outlive([work])
        raise
