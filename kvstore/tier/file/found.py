"""The runs that a start found on disk and that are not indexed yet.

Indexing a million blocks takes many seconds, and a start must not wait for that. So runs stay
packed as they were found, beside four bytes of every key, sorted. A lookup of a key takes the runs
that may hold it. The background takes the others in the order they were written, so what it indexes
is older than what was looked up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, islice
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from kvstore.format.frame import FrameHeader
from kvstore.format.frame.packed import Unsigned
from kvstore.model.block import KEY_NBYTES, BlockKey, NamespaceId
from kvstore.tier.file.live import Deaths
from kvstore.tier.file.recovery import LoadedSegment
from kvstore.tier.file.segment import FileExtent, FramePlace

_NUMBERS_OF_A_KEY = KEY_NBYTES // 8  # the first of them is its head
_RUN = np.uint64(0xFFFF_FFFF)  # the lower half of an entry
SHARED_ENTRIES = 1 << 20  # are worth a second thread: ten times as many take 0.6 s to sort


@dataclass(frozen=True, slots=True)
class FrameRecord:
    """A run found on disk. live: positions of the blocks that nothing killed, ascending, one or
    more. The same block may be live in several runs: the one of the highest sequence counts.

    location: a FileExtent; where several directories are one tier, a place of that."""

    location: Any
    header: FrameHeader
    live: tuple[int, ...]


class Taken(NamedTuple):
    """Runs to index, oldest first, and the extents of those with nothing live in them."""

    records: list[FrameRecord]
    dead: list[FileExtent]


class Found:
    """The runs of one directory that are not indexed yet. `len`: how many.

    suspects: runs that are not to be trusted; they count as dead.
    """

    def __init__(
        self,
        segments: Sequence[LoadedSegment] = (),
        suspects: Set[FramePlace] = frozenset(),
    ) -> None:
        self._suspects = suspects
        self._deaths = Deaths(header for s in segments for header in s.tombstones)
        self.namespaces: set[NamespaceId] = set()
        runs = [segment.frames.where(segment.frames.blocks > 0) for segment in segments]
        self._runs = [frames for frames in runs if len(frames)]
        for frames in self._runs:
            self.namespaces |= frames.namespaces()
        # A run has one number over all segments: this segment's first, and its place there.
        self._firsts = [0, *accumulate(map(len, self._runs))]
        self._left = self._firsts[-1]
        self._taken = bytearray(self._left)
        none: Unsigned = np.zeros(0, np.uint64)
        self._sequences = np.concatenate([none, *(frames.sequences for frames in self._runs)])
        self._by_age = np.argsort(self._sequences, kind="stable").tolist()[::-1]  # oldest last
        self._entries = _sorted(self._listed())

    def __len__(self) -> int:
        return self._left

    def note(self, tombstone: FrameHeader) -> None:
        """Let a tombstone written since the start kill runs that are left."""
        if self._left:
            self._deaths.note(tombstone)

    def take(self, keys: Sequence[BlockKey]) -> Taken:
        """Take the runs that hold any of `keys`; a few others may be among them."""
        if not self._left or not keys:
            return Taken([], [])
        heads = np.frombuffer(b"".join(keys), "<u8")[::_NUMBERS_OF_A_KEY]
        runs: set[int] = set()
        for entries in self._entries:
            first = np.searchsorted(entries, heads & ~_RUN, "left").tolist()
            last = np.searchsorted(entries, heads | _RUN, "right").tolist()
            for start, end in zip(first, last, strict=True):
                runs.update((entries[start:end] & _RUN).tolist())
        return self._take(sorted(run for run in runs if not self._taken[run]))

    def take_oldest(self, count: int) -> Taken:
        """Take up to `count` of the runs, by age."""
        return self._take(islice(self._oldest(), count))

    @property
    def oldest_sequence(self) -> int:
        """That of the oldest run. There must be one."""
        oldest = next(self._oldest())
        self._by_age.append(oldest)
        return int(self._sequences[oldest])

    def _listed(self) -> Unsigned:
        """Return a number for each block: half of its key's head, and then the number of its run.
        `argsort` of the heads takes two to three times as long as it takes to sort these."""
        listed: Unsigned = np.empty(sum(len(frames.heads) for frames in self._runs), np.uint64)
        at = 0
        for first, frames in zip(self._firsts, self._runs, strict=False):
            some = listed[at : at + len(frames.heads)]
            np.bitwise_and(frames.heads, ~_RUN, out=some)
            some |= np.repeat(np.arange(first, first + len(frames), dtype=np.uint64), frames.blocks)
            at += len(some)
        return listed

    def _oldest(self) -> Iterator[int]:
        """Take runs off the list by age."""
        while self._by_age:
            if not self._taken[run := self._by_age.pop()]:
                yield run

    def _take(self, runs: Iterable[int]) -> Taken:
        taken = Taken([], [])
        for run in runs:
            self._taken[run] = True
            self._left -= 1
            segment = bisect_right(self._firsts, run) - 1
            frames, index = self._runs[segment], run - self._firsts[segment]
            location = FileExtent(
                frames.tag.number, int(frames.offsets[index]), int(frames.nbytes[index])
            )
            header = frames.header(index)
            if FramePlace(frames.tag, location.offset) in self._suspects:
                header = None
            live = self._deaths.live(header) if header is not None else ()
            if header is not None and live:
                taken.records.append(FrameRecord(location, header, live))
            else:
                taken.dead.append(location)
        taken.records.sort(key=lambda record: record.header.sequence)
        if not self._left:
            self._runs, self._by_age, self._entries = [], [], []
        return taken


def _sorted(entries: Unsigned) -> list[Unsigned]:
    """Sort numbers in place; return them in one or two halves, each sorted by a thread."""
    if len(entries) < SHARED_ENTRIES:
        entries.sort()
        return [entries]
    half = len(entries) // 2
    beside = Thread(target=entries[:half].sort)
    beside.start()
    entries[half:].sort()
    beside.join()
    return [entries[:half], entries[half:]]
