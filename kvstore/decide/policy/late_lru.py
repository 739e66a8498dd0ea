"""LRU that takes over a full tier, and learns of its blocks a few at a time.

A tier may have millions of them, and whoever caused the change waits. So every call learns of a
few, in no order of use: nobody knows one. What a request asks for is learned at once, so it counts
as used. What is known and was not used since leaves first. While a block is not known, its parent
may leave before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvstore.decide.policy.lru import FOUND, RING, TailFirstLru
from kvstore.decide.rows import FIRST_ROW, Rows
from kvstore.model.block import BlockKey

BLOCK_ROWS = 8  # looked at for each block that comes, or when one is to leave
REQUEST_ROWS = 128
STEP_ROWS = 1024  # where nothing is known that could leave, and at first
WALK_ROWS_MAX = 8 * STEP_ROWS  # by one walk that has found some
SEARCH_ROWS_MAX = 16 * WALK_ROWS_MAX  # by one that has found none yet: 12 ms, once

Links = Iterable[tuple[BlockKey, BlockKey | None]]


class Stored(Protocol):
    """What the books say of a tier: keys and parents of its blocks, by their rows."""

    @property
    def end(self) -> int:
        """All rows come before this one."""

    def within(self, begin: int, end: int) -> Links:
        """Return the blocks of the rows [begin, end)."""

    def among(self, keys: Sequence[BlockKey]) -> Links:
        """Return those of some keys that are in the tier."""


class NothingStored:
    """The books of an empty tier."""

    end = 0

    def within(self, begin: int, end: int) -> Links:
        return ()

    def among(self, keys: Sequence[BlockKey]) -> Links:
        return ()


class LateLru(TailFirstLru):
    """`Policy` says what the methods do. rows: of those who kept columns there and have left, it
    drops the rows as well."""

    def __init__(self, stored: Stored, rows: Rows | None = None) -> None:
        super().__init__(rows)
        self._stored = stored
        self._next = FIRST_ROW
        self._knows_all = False
        self._learn(STEP_ROWS)

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._learn(BLOCK_ROWS)
        super().insert(key, parent)

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        self._learn_of(prefix)
        self._learn(REQUEST_ROWS)
        super().touch(prefix, level)

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        self._learn_of(prefix)
        return super().alone(prefix)

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        self._learn_of(prefix)
        super().let_go(prefix)

    def is_leaf(self, key: BlockKey) -> bool:
        self._learn_of((key,))
        return super().is_leaf(key)

    def victims(self) -> Iterator[BlockKey]:
        self._learn(BLOCK_ROWS)
        if self._knows_all:
            yield from super().victims()
            return
        passed, looked_at = set[BlockKey](), 0
        while True:
            most = WALK_ROWS_MAX if passed else SEARCH_ROWS_MAX
            is_last = self._knows_all or looked_at >= most
            for key in self._walk(RING if is_last else FOUND):
                if key not in passed:
                    passed.add(key)
                    yield key
            if is_last:
                return
            # Between two walks: what comes during one would be in its way.
            self._learn(STEP_ROWS)
            looked_at += STEP_ROWS

    def _learn(self, rows: int) -> None:
        """Look at so many rows more, if there are some."""
        if self._knows_all:
            return
        begin, end = self._next, min(self._next + rows, self._stored.end)
        for key, parent in self._stored.within(begin, end):
            self.adopt(key, parent)
        self._next = max(begin, end)
        is_swept = not self._tree.rows.sweep(rows)
        self._knows_all = is_swept and self._next >= self._stored.end

    def _learn_of(self, keys: Sequence[BlockKey]) -> None:
        if not self._knows_all:
            for key, parent in self._stored.among(keys):
                self.adopt(key, parent)
