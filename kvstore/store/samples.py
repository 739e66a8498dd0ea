"""What a node held and did, sample by sample: fine ones of the last minutes, coarse ones of a day.

A sample is a row of numbers, one for each of COLUMNS. A coarse sample is made of finer ones: what
is held is that of its end, queues are the longest, and what was counted is added up. As in a
round-robin database, memory is bounded: 948 rows of 0.6 KiB, and a row that says the same as the
one before it is the same object, so a node that nobody uses keeps next to nothing.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstore.model.outcome import COMPLETE, Reason

TIERS = ("dram", "file", "object", "peer", "pool")
HELD = (
    "dram.used_bytes",
    "dram.capacity_bytes",
    "dram.leased_bytes",
    "dram.pinned_bytes",
    "dram.limbo_bytes",
    "file.used_bytes",
    "file.capacity_bytes",
    "file.leased_bytes",
    "object.used_bytes",
    "object.capacity_bytes",
    "dirty_bytes",
    "blocks",
    "sessions",
    "leases",
)
MOST = (
    "queue.promote",
    "queue.write_behind",
    "queue.room",
    "queue.recall",
    "queue.upload",
    "queue.pool",
    "durable_lag_s",
)
COUNTED = (
    *(f"read.{tier}" for tier in TIERS),
    *(f"written.{tier}" for tier in TIERS),
    "lookup_blocks",
    "lookup_tokens",
    *(f"hit_blocks.{tier}" for tier in TIERS),
    *(f"hit_tokens.{tier}" for tier in TIERS),
    "requests",
    *(f"ended.{reason}" for reason in (COMPLETE, *Reason)),
    "saved_prefill_s",
)
COLUMNS = (*HELD, *MOST, *COUNTED)
_MOST_AT, _COUNTED_AT = len(HELD), len(HELD) + len(MOST)

STEPS_S = {1: 300, 10: 360, 300: 288}  # seconds that a sample covers -> how many are kept
UNPACKED_NBYTES_MAX = 16 << 20
COLUMNS_MAX = 1024  # of another release
_COMPRESSION = 1


class Sample(NamedTuple):
    """at: its end, seconds since the epoch. seconds: that it covers; the first after a start covers
    fewer than its step, one that was taken late more. values: one for each of COLUMNS."""

    at: float
    seconds: float
    values: Sequence[float]


class Packed(msgspec.Struct, array_like=True):
    """Rows of one step as they are kept: values back to back, f64 little-endian."""

    step_s: int
    at: list[float]
    seconds: list[float]
    values: bytes


class Kept(msgspec.Struct, array_like=True):
    """What another life has kept. columns: by name, because releases differ in them."""

    columns: list[str]
    levels: list[Packed]


class Samples:
    """The samples of all steps, oldest first."""

    def __init__(self) -> None:
        self._kept = {step: deque[Sample](maxlen=most) for step, most in STEPS_S.items()}
        self._open: dict[int, Sample] = {}  # coarse ones that are not over

    def add(self, at: float, seconds: float, values: Sequence[float]) -> Sample:
        """Take what was measured since the last sample; returns it.

        What is dated later than `at` is forgotten: somebody has set the clock back.
        """
        last = self.last
        if last is not None and last.at > at:
            self._forget_after(at)
            last = self.last
        row: Sequence[float] = array("d", values)
        if last is not None and row == last.values:
            row = last.values
        sample = Sample(at, seconds, row)
        self._kept[1].append(sample)
        for step in (step for step in STEPS_S if step > 1):
            self._add_to(step, sample)
        return sample

    @property
    def last(self) -> Sample | None:
        fine = self._kept[1]
        return fine[-1] if fine else None

    def since(self, step_s: int, at: float = 0.0) -> list[Sample]:
        """Return the samples of a step that end after `at`; the last one may not be over yet."""
        found = [sample for sample in self._kept[step_s] if sample.at > at]
        now = self._open.get(step_s)
        return [*found, now] if now is not None and now.at > at else found

    def _add_to(self, step: int, sample: Sample) -> None:
        before = self._open.get(step)
        if before is not None and _place(before, step) != _place(sample, step):
            self._kept[step].append(before)
            before = None
        self._open[step] = sample if before is None else _joined(before, sample)

    def _forget_after(self, at: float) -> None:
        for step, kept in self._kept.items():
            while kept and kept[-1].at > at:
                kept.pop()
            if (now := self._open.get(step)) is not None and now.at > at:
                del self._open[step]

    # ---- another life --------------------------------------------------------------------------

    def rows(self) -> dict[int, list[Sample]]:
        """Return all there is, for `packed`."""
        return {step: self.since(step) for step in STEPS_S}

    def load(self, kept: bytes, recent: bytes, now: float) -> None:
        """Go on where another life was when it kept these: all rows, and fine ones since. What
        cannot be read is ignored, and so is what is dated later than `now`."""
        for step, rows in unpacked(kept).items():
            self._kept[step].extend(row for row in rows if row.at <= now)
        last = max((rows[-1].at for rows in self._kept.values() if rows), default=0.0)
        for step in (step for step in STEPS_S if step > 1):
            if self._kept[step]:
                self._open[step] = self._kept[step].pop()  # it may go on
        for row in unpacked(recent).get(1, ()):
            if last < row.at <= now:
                self.add(*row)


def packed(rows: Mapping[int, Iterable[Sample]]) -> bytes:
    """Return rows by step as bytes: at most 0.6 MiB, a tenth of it on a quiet day. Any thread may
    call it."""
    levels = []
    for step, of_step in rows.items():
        these = list(of_step)
        values = b"".join(array("d", row.values).tobytes() for row in these)
        levels.append(Packed(step, [r.at for r in these], [r.seconds for r in these], values))
    return zlib.compress(msgspec.msgpack.encode(Kept(list(COLUMNS), levels)), _COMPRESSION)


def unpacked(data: bytes) -> dict[int, list[Sample]]:
    """Return what `packed` was given; nothing for anything else. Columns that are not known here
    are left out, and those that were not known there are 0."""
    try:
        inflate = zlib.decompressobj()
        kept = msgspec.msgpack.decode(inflate.decompress(data, UNPACKED_NBYTES_MAX), type=Kept)
    except (zlib.error, msgspec.MsgspecError, ValueError):
        return {}
    width = len(kept.columns)
    if not 0 < width <= COLUMNS_MAX:
        return {}
    places = {name: place for place, name in enumerate(kept.columns)}
    order = [places.get(name) for name in COLUMNS]
    found: dict[int, list[Sample]] = {}
    for level in kept.levels:
        if level.step_s in STEPS_S and len(level.values) == 8 * width * len(level.at):
            found[level.step_s] = _rows(level, width, order)
    return found


def _rows(level: Packed, width: int, order: Sequence[int | None]) -> list[Sample]:
    values = array("d", level.values)
    rows: list[Sample] = []
    for number, (at, seconds) in enumerate(zip(level.at, level.seconds, strict=False)):
        row: Any = values[number * width : (number + 1) * width]
        row = array("d", [row[place] if place is not None else 0.0 for place in order])
        after = rows[-1].at if rows else 0.0
        if not (after < at < math.inf and 0 < seconds < math.inf and all(map(math.isfinite, row))):
            continue
        rows.append(
            Sample(at, seconds, rows[-1].values if rows and row == rows[-1].values else row)
        )
    return rows[-STEPS_S[level.step_s] :]


def _place(sample: Sample, step: int) -> int:
    """Return the number of the interval of `step` seconds that most of a sample is in."""
    return int((sample.at - min(sample.seconds, step) / 2) // step)


def _joined(before: Sample, after: Sample) -> Sample:
    one, two = before.values, after.values
    values = array("d", two[:_MOST_AT])
    values.extend(map(max, one[_MOST_AT:_COUNTED_AT], two[_MOST_AT:_COUNTED_AT]))
    values.extend(a + b for a, b in zip(one[_COUNTED_AT:], two[_COUNTED_AT:], strict=True))
    return Sample(after.at, before.seconds + after.seconds, values)
