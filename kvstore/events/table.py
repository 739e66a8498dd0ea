"""One row for each block of a namespace whose tokens are known, in packed arrays.

A row has no Python object: 26 bytes, 4 for each token, and its place in a hash table of row
numbers. All methods take and return arrays, so a batch costs about as much as one row.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Rows = NDArray[np.int64]
_FREE, _DEAD = -1, -2  # slots of the hash table that were never used, and whose row has left
_SLOTS_MIN = 1 << 10
_BUCKET = 8
MAPPED_NBYTES_MIN = 1 << 16
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FULL = 0.8
MANY = 255
_DEAD_MAX = 0.1
_SHIFT = np.uint64(16)


class Table:
    """Rows by hash. The columns may be read by row numbers.

    parents: 0 where a block is the first of its prefix. now: where the block is, as `place_of`
    says. told: where the routers believe it is. labels: what it runs with, by the caller's number.
    children: how many told blocks follow it; MANY are not counted any more. fresh: 1 from when its
    tokens came to when it was seen somewhere.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.hashes: Hashes = np.empty(0, np.uint64)
        self.parents: Hashes = np.empty(0, np.uint64)
        self.depths: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.labels: NDArray[np.uint16] = np.empty(0, np.uint16)
        self.now: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.told: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.children: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.fresh: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.tokens: NDArray[np.uint32] = np.empty((0, block_tokens), np.uint32)
        self._slots: NDArray[np.int32] = np.full(_SLOTS_MIN, _FREE, np.int32)
        self._used = 0  # rows that were ever given out
        self._dead = 0
        self._free: list[Rows] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the rows given out, and of the hash table."""
        row = 8 + 8 + 4 + 2 + 1 + 1 + 1 + 1 + 4 * self.block_tokens
        free = sum(rows.nbytes for rows in self._free)
        return self._used * row + self._slots.nbytes + free

    def find(self, hashes: Hashes) -> Rows:
        """Return the row of each hash, -1 where there is none."""
        return self._look(hashes)[0]

    def add(
        self,
        hashes: Hashes,
        parents: Hashes,
        depths: NDArray[Any],
        tokens: NDArray[np.uint32],
        label: int,
    ) -> Rows:
        """Add rows of hashes that are not there, each once; returns them."""
        count = len(hashes)
        size = len(self._slots)
        if self._count + self._dead + count > _FULL * size or self._dead > _DEAD_MAX * size:
            self._rehash(self._count + count)
        rows = self._take(count)
        self.hashes[rows], self.parents[rows], self.depths[rows] = hashes, parents, depths
        self.tokens[rows], self.labels[rows] = tokens, label
        self.now[rows] = self.told[rows] = self.children[rows] = 0
        self.fresh[rows] = 1
        self._place(hashes, rows)
        self._count += count
        return rows

    def remove(self, rows: Rows) -> None:
        """Remove rows that are there, each once."""
        if not len(rows):
            return
        _, slots = self._look(self.hashes[rows])
        self._slots[slots] = _DEAD
        self._dead += len(rows)
        self._count -= len(rows)
        self.now[rows] = self.told[rows] = 0
        self._free.append(rows.copy())

    def rows(self) -> Rows:
        """Return all rows, in no order."""
        return self._slots[self._slots >= 0].astype(np.int64)

    def followers(self, rows: Rows) -> Rows:
        """Return the told rows that follow one of these. It looks at all rows."""
        all_ = np.flatnonzero(self.told[: self._used])
        return all_[np.isin(self.parents[all_], self.hashes[rows])]

    def tell(self, rows: Rows, told: NDArray[np.uint8]) -> None:
        """Set where the routers believe rows are, each once."""
        before = self.told[rows] != 0
        self.told[rows] = told
        for changed, by in ((~before & (told != 0), 1), (before & (told == 0), -1)):
            parents = self.parents[rows[changed]]
            if not parents.any():
                continue
            above = self.find(parents[parents != 0])
            above, counts = np.unique(above[above >= 0], return_counts=True)
            followed = self.children[above].astype(np.int64)
            now = np.where(followed == MANY, MANY, np.minimum(followed + by * counts, MANY))
            self.children[above] = now

    # ---- the hash table ----------------------------------------------------------------------

    # Slots come in buckets of 8, and a batch is looked up a bucket at a time: a step costs about as
    # much for one hash as for a thousand, so few steps are worth more than few slots.

    def _look(self, hashes: Hashes) -> tuple[Rows, Rows]:
        """Return the row of each hash, and its slot; -1 where there is none."""
        rows, slots = np.full(len(hashes), -1, np.int64), np.full(len(hashes), -1, np.int64)
        if not self._used:
            return rows, slots
        buckets = self._slots.reshape(-1, _BUCKET)
        left = np.arange(len(hashes))
        at = self._bucket(hashes)
        while len(left):
            found = buckets[at]
            same = (self.hashes[found] == hashes[left, None]) & (found >= 0)
            column = same.argmax(axis=1)
            each = np.arange(len(left))
            hit = same[each, column]
            rows[left[hit]] = found[each, column][hit]
            slots[left[hit]] = (at * _BUCKET + column)[hit]
            on = ~hit & ~(found == _FREE).any(axis=1)
            left, at = left[on], (at[on] + 1) % len(buckets)
        return rows, slots

    def _place(self, hashes: Hashes, rows: Rows) -> None:
        buckets = self._slots.reshape(-1, _BUCKET)
        at = self._bucket(hashes)
        while len(rows):
            found = buckets[at]
            is_open = found < 0
            column = is_open.argmax(axis=1)
            each = np.arange(len(rows))
            has = is_open[each, column]
            before = found[each, column]
            buckets[at[has], column[has]] = rows[has]  # of several for one slot, the last gets it
            placed = has & (buckets[at, column] == rows)
            self._dead -= int(np.count_nonzero(before[placed] == _DEAD))
            at = np.where(has, at, (at + 1) % len(buckets))[~placed]
            rows = rows[~placed]

    def _bucket(self, hashes: Hashes) -> Rows:
        mask = np.uint64(len(self._slots) // _BUCKET - 1)
        return ((hashes >> _SHIFT) & mask).astype(np.int64)

    def _rehash(self, count: int) -> None:
        rows = self.rows()
        size = _SLOTS_MIN
        while count > _FULL * 0.97 * size:
            size *= 2
        self._slots = _column((size,), np.dtype(np.int32))
        self._slots[:] = _FREE
        self._dead = 0
        self._place(self.hashes[rows], rows)

    # ---- rows --------------------------------------------------------------------------------

    def _take(self, count: int) -> Rows:
        taken: list[Rows] = []
        while count and self._free:
            rows = self._free.pop()
            if len(rows) > count:
                self._free.append(rows[count:])
                rows = rows[:count]
            taken.append(rows)
            count -= len(rows)
        if count:
            self._grow(self._used + count)
            taken.append(np.arange(self._used, self._used + count, dtype=np.int64))
            self._used += count
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def _grow(self, rows: int) -> None:
        """Let every column have so many rows. Memory that was never written takes no room."""
        if rows <= len(self.hashes):
            return
        size = max(rows, len(self.hashes) * 2, 1024)
        for name in (
            "hashes",
            "parents",
            "depths",
            "labels",
            "now",
            "told",
            "children",
            "fresh",
            "tokens",
        ):
            before = getattr(self, name)
            column = _column((size, *before.shape[1:]), before.dtype)
            column[: self._used] = before[: self._used]
            setattr(self, name, column)


def _column(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return memory of its own that is given back to the system when it is replaced: the heap keeps
    what a column has outgrown, which is as much as the column."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MAPPED_NBYTES_MIN:
        return np.empty(shape, dtype)
    mapped = mmap.mmap(-1, nbytes, PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_NOHUGEPAGE)  # of which the last one would be half empty
    return np.frombuffer(mapped, dtype).reshape(shape)


def hashes_of(keys: bytes, key_nbytes: int) -> Hashes:
    """Return the first 8 bytes of each of the keys, which lie back to back, as numbers."""
    words = np.frombuffer(keys, "<u8").reshape(-1, key_nbytes // 8)
    return words[:, 0].astype(np.uint64)


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays behind each other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
