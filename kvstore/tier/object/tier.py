"""The object tier: runs of blocks in a bucket that several daemons share.

`ObjectTier` starts and stops it; its parts can be read alone:

    lookups  what the bucket has of a prefix               (lookups.py)
    reads    records into memory                           (reads.py)
    writes   runs into the bucket                          (writes.py)
    deletes  tombstones for every daemon                   (deletes.py)
    keys     of the tenant, where objects are encrypted    (keys.py)

Below them: `names` and `layout` say what is stored, `walk` how a prefix is found, `collection`
which objects are deleted for room; all of that is pure. `requests` talks to the bucket. `upkeep`
runs in the background.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set
from typing import Any

from kvstore.metrics import Metrics
from kvstore.model.block import NamespaceId
from kvstore.sealing import Erasure, Sealing
from kvstore.settings import ObjectSettings
from kvstore.system.background import keep_running
from kvstore.system.bandwidth import ChannelLane
from kvstore.tier.object.catalog import Catalog
from kvstore.tier.object.connect import connect
from kvstore.tier.object.deletes import Deletes
from kvstore.tier.object.failure import ObjectFailed, ObjectRefused
from kvstore.tier.object.keys import BucketKeys, names_of
from kvstore.tier.object.lookups import Lookups
from kvstore.tier.object.names import Names
from kvstore.tier.object.reads import Reads
from kvstore.tier.object.requests import Bucket, Requests
from kvstore.tier.object.tombstones import Tombstones
from kvstore.tier.object.upkeep import Upkeep
from kvstore.tier.object.writes import Writes

DELETES_AT_ONCE = 1000  # what S3 takes in one request


class ObjectTier:
    """One bucket prefix. Lives on one event loop; every deadline is on `now`'s clock."""

    def __init__(
        self,
        settings: ObjectSettings,
        metrics: Metrics,
        *,
        bucket: Bucket | None = None,
        sealing: Sealing | None = None,
        lane: ChannelLane | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """bucket: used instead of the one that `settings.url` names. sealing: objects are
        encrypted; those in clear are neither seen nor counted then. lane: what may be moved, beside
        others. Raises ConfigError."""
        self._metrics = metrics
        self._now = now
        self._requests = Requests(
            bucket if bucket is not None else connect(settings),
            metrics=metrics,
            now=now,
            timeout_s=settings.timeout_s,
            requests_max=settings.requests_max,
            lane=lane,
        )
        self._catalog = Catalog(now, settings.believed_s)
        self._tombstones = Tombstones()
        names = names_of(sealing, settings.url)
        self.keys = BucketKeys(self._requests, names, sealing)
        self._upkeep = Upkeep(
            self._requests,
            self._catalog,
            self._tombstones,
            self.keys,
            settings=settings,
            metrics=metrics,
            now=now,
        )
        self._wire(names, settings, metrics)
        self._task: asyncio.Task[None] | None = None
        self._publish(metrics)

    def _wire(self, names: Names, settings: ObjectSettings, metrics: Metrics) -> None:
        """Make the parts that callers use."""
        now = self._now
        self.lookups = Lookups(
            self._requests,
            self._catalog,
            self._tombstones,
            self.keys,
            informed=self._upkeep.informed,
            timeout_s=settings.timeout_s,
            metrics=metrics,
            now=now,
        )
        self.reads = Reads(self._requests, self._catalog, names)
        self.writes = Writes(
            self._requests,
            self._catalog,
            self._tombstones,
            self._upkeep,
            self.keys,
            settings=settings,
            metrics=metrics,
            now=now,
        )
        self.deletes = Deletes(
            self._requests,
            self._catalog,
            self._tombstones,
            self.writes,
            names,
            metrics=metrics,
            now=now,
        )

    def _publish(self, metrics: Metrics) -> None:
        for state, value in {
            "capacity": lambda: self._upkeep.capacity_bytes,
            "counted": lambda: self.writes.physical_nbytes,
            "in_flight": lambda: self.writes.in_flight_nbytes,
        }.items():
            metrics.object_bytes.labels(state).set_function(value)

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap; what is over it is collected soon."""
        self._upkeep.set_capacity(nbytes)

    def keep(self, nbytes: int) -> None:
        """Collect nothing for room of what is within `nbytes`, even if the cap is less."""
        self._upkeep.kept_bytes = nbytes

    @property
    def capacity_bytes(self) -> int:
        return self._upkeep.capacity_bytes

    @property
    def is_counted(self) -> bool:
        """Whether it is known how much the bucket has: until then, nothing is written."""
        return self._upkeep.is_counted

    @property
    def run_nbytes_max(self) -> int:
        """Bytes of the largest run that was written, or refused, in this life."""
        return self._upkeep.run_nbytes_max

    def share_room(self, counted: Callable[[], None], short: Callable[[], None]) -> None:
        """Have `counted` called after each count, before anything is collected, and `short` before
        a run is refused for want of room: both may set the cap."""
        self._upkeep.counted, self._upkeep.short = counted, short

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of what was in the bucket at the last count."""
        return self._upkeep.namespaces

    def stats(self) -> dict[str, Any]:
        return {
            "capacity_bytes": self._upkeep.capacity_bytes,
            "physical_bytes": self.writes.physical_nbytes,
            "in_flight_bytes": self.writes.in_flight_nbytes,
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
        """Start the upkeep. Until it has read the tombstones, nothing is found; until it has
        counted the objects, nothing is written. A store that is down does not delay the start."""
        self._task = asyncio.get_running_loop().create_task(
            keep_running("bucket", self._upkeep.run, self._metrics.task_failed)
        )

    async def ready(self, deadline: float) -> None:
        """Wait until the tier finds and writes. Raises ObjectFailed, and ObjectRefused at once if
        the store refuses, because waiting does not help."""
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
        """Do now what the upkeep does periodically. Raises Unavailable."""
        await self._upkeep.inform()
        await self._upkeep.collect()

    async def erase(self, timeout_s: float) -> Erasure:
        """Destroy the keys, and delete every object under the prefix, whoever wrote it.

        Returns how far nothing of it can be read again. Cancel your writes before; nothing but
        `close` is to be called afterwards. Raises Unavailable.
        """
        await self._end_upkeep()  # it would put the clock again
        deadline = self._now() + timeout_s
        erased = await self.keys.destroy(deadline)
        # Again until there is none: a write that was cancelled may have reached the bucket.
        while names := [each.name async for page in self._requests.pages("") for each in page]:
            for start in range(0, len(names), DELETES_AT_ONCE):
                await self._requests.delete(names[start : start + DELETES_AT_ONCE], deadline)
            if self._now() > deadline:
                raise ObjectFailed(f"{len(names)} objects came back", reason="deadline")
        return erased

    async def close(self) -> None:
        """Stop. Cancel your writes and reads before."""
        await self.lookups.close()
        await self._end_upkeep()
        self._requests.close()

    async def _end_upkeep(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
