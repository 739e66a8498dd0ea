"""One row for each block of a namespace whose tokens are known, in packed arrays.

A row has no Python object: 22 bytes, 4 for each token, and its place in a hash table of row
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

from kvstore_kernels import native
from kvstore_kernels.native.slots import Slots

Hashes = NDArray[np.uint64]
Rows = NDArray[np.int64]
_FREE, _DEAD, _TAG_MIN = 0, 1, 2  # tags: never used; its row has left; the least one of a hash
_SLOTS_MIN = 1 << 10
_BUCKET = 8
MAPPED_NBYTES_MIN = 1 << 16
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FULL = 0.8
MANY = 255
_DEAD_MAX = 0.1
_SHIFT = np.uint64(16)
_BYTE = np.uint64(0xFF)
_EACH = np.uint64(0x0101010101010101)
_TOP = np.uint64(0x8080808080808080)
_NOT_DEAD = np.uint64(0xFEFEFEFEFEFEFEFE)
# Of a word whose only bit is the highest of byte k, `(word >> 7) * _WHICH >> 56` is k.
_WHICH = np.uint64(sum(k << 8 * (7 - k) for k in range(_BUCKET)))
_SEVEN, _LAST_BYTE = np.uint64(7), np.uint64(56)
_JUMPS_MAX = 64  # each doubles how far a row looks up


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
        self.labels: NDArray[np.uint16] = np.empty(0, np.uint16)
        self.now: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.told: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.children: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.fresh: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.tokens: NDArray[np.uint32] = np.empty((0, block_tokens), np.uint32)
        self._slots: NDArray[np.int32] = np.empty(_SLOTS_MIN, np.int32)
        self._tags: NDArray[np.uint8] = np.zeros(_SLOTS_MIN, np.uint8)
        self._native = self._natively()
        self._used = 0  # rows that were ever given out
        self._dead = 0
        self._free: list[Rows] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the rows given out, and of the hash table."""
        row = 8 + 8 + 2 + 1 + 1 + 1 + 1 + 4 * self.block_tokens
        free = sum(rows.nbytes for rows in self._free)
        return self._used * row + self._slots.nbytes + self._tags.nbytes + free

    def find(self, hashes: Hashes) -> Rows:
        """Return the row of each hash, -1 where there is none."""
        return self._look(hashes)[0]

    def add(
        self,
        hashes: Hashes,
        parents: Hashes,
        tokens: NDArray[np.uint32],
        label: int,
    ) -> Rows:
        """Add rows of hashes that are not there and not 0, each once; returns them. Those that are
        added together lie behind each other, where there is room."""
        count, size = len(hashes), len(self._slots)
        if not count:
            return np.empty(0, np.int64)
        if self._count + self._dead + count > _FULL * size or self._dead > _DEAD_MAX * size:
            self._rehash(self._count + count)
        rows = self._take(count)
        are_one_piece = rows[-1] - rows[0] == count - 1  # they go up
        where = slice(rows[0], rows[0] + count) if are_one_piece else rows
        self.hashes[where], self.parents[where] = hashes, parents
        self.tokens[where], self.labels[where] = tokens, label
        self.now[where] = self.told[where] = self.children[where] = 0
        self.fresh[where] = 1
        self._place(hashes, rows)
        self._count += count
        return rows

    def remove(self, rows: Rows) -> None:
        """Remove rows that are there, each once."""
        if not len(rows):
            return
        _, slots = self._look(self.hashes[rows])
        self._tags[slots] = _DEAD
        self._dead += len(rows)
        self._count -= len(rows)
        self.now[rows] = self.told[rows] = 0
        self.hashes[rows] = 0  # for `above`
        self._free.append(np.sort(rows))

    def rows(self) -> Rows:
        """Return all rows, in no order."""
        return self._slots[self._tags >= _TAG_MIN].astype(np.int64)

    def told_rows(self) -> Rows:
        """Return the rows that the routers believe to be somewhere, going up."""
        return np.flatnonzero(self.told[: self._used])

    def above(self, rows: Rows) -> Rows:
        """Return the row of each one's parent, -1 where there is none."""
        parents, before = self.parents[rows], rows - 1
        above = np.where((self.hashes[before] == parents) & (parents != 0), before, -1)
        others = np.flatnonzero((above < 0) & (parents != 0))
        if len(others):
            above[others] = self.find(parents[others])
        return above

    def followers(self, gone: Rows) -> Rows:
        """Return the told rows that follow one of these, or follow one that does, however far. It
        looks at all rows a few times: once for each doubling of the longest prefix."""
        rows = self.told_rows()
        above = np.full(self._used, -1, np.int64)
        above[rows] = self.above(rows)
        found = np.zeros(self._used, np.bool_)
        found[gone] = True
        looking = rows[above[rows] >= 0]
        for _ in range(_JUMPS_MAX):
            up = above[looking]
            found[looking] |= found[up]
            above[looking] = above[up]
            looking = looking[~found[looking] & (above[looking] >= 0)]
            if not len(looking):
                break
        found[gone] = False
        return rows[found[rows]]

    def tell(self, rows: Rows, told: NDArray[np.uint8], above: Rows | None = None) -> None:
        """Set where the routers believe rows are, each once. above: what `above` says of them."""
        was, is_ = self.told[rows] != 0, told != 0
        self.told[rows] = told
        changed = np.flatnonzero(was != is_)
        if not len(changed):
            return
        up = above[changed] if above is not None else self.above(rows[changed])
        came = is_[changed]
        self._count_children(up[came], 1)
        self._count_children(up[~came], -1)

    def _count_children(self, above: Rows, by: int) -> None:
        above = above[above >= 0]
        counts: Rows | int = 1
        if not len(above):
            return
        if not (above[1:] > above[:-1]).all():
            above, counts = np.unique(above, return_counts=True)
        followed = self.children[above].astype(np.int64)
        now = np.where(followed == MANY, MANY, np.minimum(followed + by * counts, MANY))
        self.children[above] = now

    # ---- the hash table ----------------------------------------------------------------------

    # Slots come in buckets of 8. Each has a byte of its hash as a tag, and the tags of a bucket are
    # one word: what is not there is passed over without a look at a slot, or at a row. The
    # native library does the same in one call that lets other threads run.

    def _look(self, hashes: Hashes) -> tuple[Rows, Rows]:
        """Return the row of each hash, and its slot; -1 where there is none."""
        if self._native is not None:
            return self._native.find(self.hashes, hashes)
        rows, slots = np.full(len(hashes), -1, np.int64), np.full(len(hashes), -1, np.int64)
        if not self._count:
            return rows, slots
        words, last = self._tags.view("<u8"), len(self._slots) // _BUCKET - 1
        left, at, tags = np.arange(len(hashes)), self._bucket(hashes), _tag(hashes)
        while len(left):
            word = words[at]
            maybe = _zero_bytes(word ^ tags * _EACH)
            goes_on = _zero_bytes(word) == 0
            some = np.flatnonzero(maybe)
            while len(some):
                these, each = maybe[some], left[some]
                slot = at[some] * _BUCKET + _lowest(these)
                row = self._slots[slot]
                hit = self.hashes[row] == hashes[each]
                rows[each[hit]], slots[each[hit]] = row[hit], slot[hit]
                goes_on[some[hit]] = False
                maybe[some] = these & (these - np.uint64(1))
                some = some[~hit & (maybe[some] != 0)]
            left, at, tags = left[goes_on], (at[goes_on] + 1) & last, tags[goes_on]
        return rows, slots

    def _natively(self) -> Slots | None:
        """Return what looks into the slots, and fills them, without the interpreter lock."""
        return Slots(self._slots, self._tags) if native.library() is not None else None

    def _place(self, hashes: Hashes, rows: Rows) -> None:
        if self._native is not None:
            self._dead -= self._native.place(hashes, rows)
            return
        words, last = self._tags.view("<u8"), len(self._slots) // _BUCKET - 1
        at, tags = self._bucket(hashes), _tag(hashes)
        while len(rows):
            is_open = _zero_bytes(words[at] & _NOT_DEAD)
            has = is_open != 0
            slot = at * _BUCKET + _lowest(is_open)
            self._slots[slot[has]] = rows[has]  # of several for one slot, the last gets it
            placed = has & (self._slots[slot] == rows)
            its = slot[placed]
            self._dead -= int(np.count_nonzero(self._tags[its] == _DEAD))
            self._tags[its] = tags[placed]
            at = np.where(has, at, (at + 1) & last)[~placed]
            rows, tags = rows[~placed], tags[~placed]

    def _bucket(self, hashes: Hashes) -> Rows:
        mask = np.uint64(len(self._slots) // _BUCKET - 1)
        return ((hashes >> _SHIFT) & mask).astype(np.int64)

    def _rehash(self, count: int) -> None:
        rows = self.rows()
        size = _SLOTS_MIN
        while count > _FULL * 0.97 * size:
            size *= 2
        self._slots = _column((size,), np.dtype(np.int32))
        self._tags = _column((size,), np.dtype(np.uint8))
        self._tags[:] = _FREE
        self._native = self._natively()
        self._dead = 0
        self._place(self.hashes[rows], rows)

    # ---- rows --------------------------------------------------------------------------------

    def _take(self, count: int) -> Rows:
        """Return rows to be used, going up."""
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
        return taken[0] if len(taken) == 1 else np.sort(np.concatenate(taken))

    def _grow(self, rows: int) -> None:
        """Let every column have so many rows. Memory that was never written takes no room."""
        if rows <= len(self.hashes):
            return
        size = max(rows, len(self.hashes) * 2, 1024)
        for name in (
            "hashes",
            "parents",
            "labels",
            "now",
            "told",
            "children",
            "fresh",
            "tokens",
        ):
            before = getattr(self, name)
            column = _column((size, *before.shape[1:]), before.dtype)
            np.copyto(column[: self._used], before[: self._used])  # lets other threads run
            setattr(self, name, column)


def _tag(hashes: Hashes) -> Hashes:
    tags: Hashes = np.maximum(hashes & _BYTE, np.uint64(_TAG_MIN))
    return tags


def _zero_bytes(words: Hashes) -> Hashes:
    """Return the highest bit of each byte that is 0. Beyond the lowest such byte there may be a bit
    of a byte that is 1."""
    return (words - _EACH) & ~words & _TOP


def _lowest(bits: Hashes) -> Rows:
    """Return in which byte of a word its lowest bit is, of those that `_zero_bytes` returns."""
    return ((((bits & -bits) >> _SEVEN) * _WHICH) >> _LAST_BYTE).astype(np.int64)


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


def going_up(rows: Rows) -> Rows:
    """Return rows in their order, each once."""
    if (rows[1:] > rows[:-1]).all():
        return rows
    rows = np.sort(rows)
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    return rows[is_first]


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays behind each other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
