"""Measures a node once a second, and keeps the samples over restarts in the file tier's directory.

Fine samples are written every few seconds, all of those since the last time that everything was: a
killed daemon has lost the last few seconds. Nobody waits for the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client import Counter

from kvstore.metrics import Metrics
from kvstore.store.samples import COLUMNS, COUNTED, Sample, Samples, packed
from kvstore.tier.file import Devices, DiskFailed, DiskFull

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 5.0
SAVE_ALL_EVERY_S = 300.0
WRITE_S = 2.0  # for the disk to take it; a disk that hangs is not waited for


time_of_day: Callable[[], float] = time.time
"""Stamps samples; nothing is decided by it."""


class History:
    """Takes samples when `tick` is called, at most one a second.

    every_sample: what is the same all the time is written every few seconds, too; else where
    something has changed. clock: seconds since the epoch.
    """

    def __init__(
        self,
        metrics: Metrics,
        file: Devices | None,
        *,
        every_sample: bool = True,
        clock: Callable[[], float] = time_of_day,
    ) -> None:
        self.samples = Samples()
        self.every_sample = every_sample
        self._metrics = metrics
        self._file = file
        self._clock = clock
        self._measured_at = clock()
        self._totals: dict[str, float] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._saved_at = self._saved_all_at = self._measured_at
        self._saved: Sample | None = None  # the last one that is in a note
        self._saving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take what another life has kept. No sample is taken before that has ended."""
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def loaded(self) -> None:
        """Wait until what another life has kept is here, for a moment at most."""
        if self._loading is not None:
            await asyncio.wait({self._loading}, timeout=WRITE_S)

    async def _load(self) -> None:
        """A disk that does not give it is no error. Samples are taken from now on in any case."""
        try:
            if self._file is not None:
                kept, recent = await self._file.history.read(), await self._file.recent.read()
                self.samples.load(kept, recent, self._clock())
                self._saved_all_at = 0.0  # what there was is written anew, soon
        except Exception:  # nobody else would say why the past is missing
            logger.exception("history=not_loaded")
        finally:
            self._totals = _totals(self._metrics)

    def tick(self, stats: Mapping[str, Any]) -> None:
        """Take a sample if it is time to; begin to write if it is time to. stats: of now."""
        now = self._clock()
        if int(now) == int(self._measured_at) or self._totals is None:
            return
        totals = _totals(self._metrics)
        row = _held(stats)
        for name, total in totals.items():
            row[name] = total - self._totals.get(name, 0.0)
        # A clock that was set back has measured no time; what there is to tell is told.
        seconds = now - self._measured_at if now > self._measured_at else 1.0
        self.samples.add(now, seconds, [row.get(name, 0.0) for name in COLUMNS])
        self._measured_at, self._totals = now, totals
        if self._file is not None and self._saving is None and self._is_due(now):
            self._saving = asyncio.get_running_loop().create_task(self._save(now))

    async def close(self) -> None:
        """Write everything, for a moment at most."""
        if self._loading is not None:
            await self.loaded()
            self._loading.cancel()
        if self._saving is not None:
            await asyncio.wait({self._saving}, timeout=WRITE_S)
        if self._file is not None and self.samples.last is not None:
            await self._write_all(self._clock())

    def _is_due(self, now: float) -> bool:
        if abs(now - self._saved_at) < SAVE_EVERY_S:
            return False
        if abs(now - self._saved_all_at) >= SAVE_ALL_EVERY_S:
            return True
        last = self.samples.last
        changed = last is None or self._saved is None or last.values is not self._saved.values
        return self.every_sample or changed

    async def _save(self, now: float) -> None:
        self._saved_at = now  # a disk that does not take it is not tried at once again
        try:
            if abs(now - self._saved_all_at) >= SAVE_ALL_EVERY_S:
                await self._write_all(now)
            else:
                await self._write_recent(now)
        finally:
            self._saving = None

    async def _write_all(self, now: float) -> None:
        last, rows = self.samples.last, self.samples.rows()
        if self._file is not None and await _written(self._file.history.write, rows):
            self._saved, self._saved_all_at = last, now

    async def _write_recent(self, now: float) -> None:
        last, rows = self.samples.last, {1: self.samples.since(1, self._saved_all_at)}
        if self._file is not None and await _written(self._file.recent.write, rows):
            self._saved = last


async def _written(
    write: Callable[[Callable[[], bytes]], Any], rows: Mapping[int, Iterable[Sample]]
) -> bool:
    """Write rows by step; say whether the disk took them."""
    try:
        async with asyncio.timeout(WRITE_S):
            await write(partial(packed, rows))
    except (DiskFull, DiskFailed, TimeoutError) as error:
        logger.debug("history=not_saved reason=%r", str(error))
        return False
    return True


def _held(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the columns that are not counted, from the stats of a node."""
    dram, file, objects = stats["dram"], stats["file"], stats.get("object", {})
    row = {f"queue.{name}": depth for name, depth in stats["queues"].items()}
    row |= {f"dram.{name}": number for name, number in dram.items()}
    return row | {
        "file.used_bytes": file["physical_bytes"],
        "file.capacity_bytes": file["capacity_bytes"],
        "file.leased_bytes": file["leased_bytes"],
        "object.used_bytes": objects.get("physical_bytes", 0),
        "object.capacity_bytes": objects.get("capacity_bytes", 0),
        "queue.upload": objects.get("uploads_waiting", 0),
        "queue.pool": stats.get("pool", {}).get("puts_waiting", 0),
        "dirty_bytes": stats["dirty_bytes"],
        "durable_lag_s": stats["durable_lag_s"],
        "blocks": stats["blocks"],
        "sessions": stats["sessions"],
        "leases": stats["leases"],
    }


_DIRECTIONS = {"read": "read", "write": "written", "borrowed": "read.peer", "lent": "written.peer"}


def _totals(metrics: Metrics) -> dict[str, float]:
    """Return what was counted since the start, by column."""
    found: dict[str, float] = {}
    families: tuple[tuple[Counter, str], ...] = (
        (metrics.lookups, "lookup_blocks"),
        (metrics.lookup_tokens, "lookup_tokens"),
        (metrics.hits, "hit_blocks"),
        (metrics.hit_tokens, "hit_tokens"),
        (metrics.requests, "ended"),
        (metrics.saved_prefill_seconds, "saved_prefill_s"),
    )
    for counter, name in families:
        for labels, value in _values(counter):
            found[".".join((name, *labels))] = value
    found["requests"] = sum(value for name, value in found.items() if name.startswith("ended."))
    for (tier, direction), value in _values(metrics.bytes):
        if direction in ("read", "write"):
            found[f"{_DIRECTIONS[direction]}.{tier}"] = value
    for (direction,), value in _values(metrics.peer_bytes):
        found[_DIRECTIONS[direction]] = value
    return {name: found.get(name, 0.0) for name in COUNTED}


def _values(counter: Counter) -> Iterable[tuple[tuple[str, ...], float]]:
    """Yield the label values and the total of each of a counter's series."""
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield tuple(sample.labels.values()), sample.value
