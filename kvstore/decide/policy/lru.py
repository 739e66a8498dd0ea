"""LRU in which the tail of a prefix leaves before its head.

A prefix is only worth the blocks that are left from its start, so evicting the head of a
conversation would waste everything behind it. All blocks used together are made recent from the
tail to the head: the head ends up the most recent of them. A block written later (decoded after its
parent was last used) is placed just before its parent, in the order of leaving, so a child never
outlives it. This is leaf-LRU, what vLLM and SGLang do on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvstore.decide.policy.prefix_tree import PrefixTree
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey

PASSED_MAX = 4096
"""Blocks with children that one walk passes over: they are behind tails that somebody holds."""
RING = 0  # a mark: newer = the oldest block, older = the newest
FOUND = 1  # a mark: everything newer was inserted or touched since


class TailFirstLru:
    """A doubly linked ring of rows from the oldest block to the newest; every operation is O(1) a
    block. rows: shared with whoever else keeps columns; None: its own."""

    def __init__(self, rows: Rows | None = None) -> None:
        self._tree = PrefixTree(rows)
        self._older = self._tree.column("I")
        self._newer = self._tree.column("I")
        self._link(FOUND, RING)
        self._held: dict[BlockKey, int] = {}  # how often; they are linked to themselves alone

    def __len__(self) -> int:
        return self._tree.blocks

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._insert(key, parent, RING)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._insert(key, parent, FOUND)

    def adopt_run(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        self._insert(keys[0], parent, FOUND)
        first, rest = self._tree.find(keys[0]), list(keys[1:])
        rows = None
        if rest and self._held.keys().isdisjoint(keys):
            rows = self._tree.enter_after(first, rest)
        if rows is not None:
            self._link_after(first, rows)
            return
        for key, above in zip(rest, keys, strict=False):
            self._insert(key, above, FOUND)

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        here, newer = self._tree.here, self._newer
        first = last = 0
        for row in reversed(self._tree.rows.find_all(prefix)):
            if not here[row]:
                continue
            if last and newer[last] == row:  # what was used together is moved together
                last = row
            elif newer[row] != row:  # else somebody holds it
                if last:
                    self._move(first, last)
                first = last = row
        if last:
            self._move(first, last)

    def _move(self, first: int, last: int) -> None:
        """Make neighbours in the ring the newest, as they are: `first` is the oldest of them."""
        older, newer = self._older, self._newer
        below, above = older[first], newer[last]
        newer[below], older[above] = above, below
        below = older[RING]
        newer[last], older[first] = RING, below
        newer[below], older[RING] = first, last

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the tail that no other prefix shares."""
        tail: list[BlockKey] = []
        for key in reversed(prefix):
            row = self._tree.find(key)
            if row:
                if self._tree.children[row] > (1 if tail else 0):
                    break
                tail.append(key)
        return tail[::-1]

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing: LRU goes by use alone."""

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        """Take it as a use: LRU knows no better."""
        self.touch(keys)

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        for key in prefix:
            count = self._held.get(key, 0)
            self._held[key] = count + 1
            row = self._tree.find(key)
            if row and not count:
                self._unlink(row)
                self._older[row] = self._newer[row] = row

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        for key in reversed(prefix):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                row = self._tree.find(key)
                if row:
                    self._link(row, RING)

    def is_leaf(self, key: BlockKey) -> bool:
        row = self._tree.find(key)
        return bool(row) and not self._tree.children[row] and key not in self._held

    def save(self) -> bytes:
        """Return nothing: what was written in which order is known from the frames."""
        return b""

    def load(self, saved: bytes) -> None:
        """Do nothing."""

    def remove(self, key: BlockKey) -> None:
        row = self._tree.find(key)
        if row:
            self._tree.leave(row)
            self._unlink(row)

    def victims(self) -> Iterator[BlockKey]:
        return self._walk(RING)

    def _walk(self, end: int) -> Iterator[BlockKey]:
        """Do what `victims` does, up to a mark."""
        tree, newer = self._tree, self._newer
        row, passed = newer[RING], set[int]()
        while row != end and len(passed) < PASSED_MAX:
            if tree.here[row] and tree.children[row]:
                passed.add(row)
            leaf = row
            while tree.here[leaf] and not tree.children[leaf]:
                above = tree.parents[leaf]
                yield tree.rows.keys[leaf]
                # A parent that came after its children may be older than they are.
                leaf = above if not tree.here[leaf] and above in passed else RING
            # What was removed meanwhile still points on to newer blocks: follow it into the ring.
            # No block comes during a walk, so its row is nobody else's yet.
            row = newer[row]

    def retire(self) -> None:
        """Give all rows back: another policy takes over."""
        self._tree.retire()

    def _insert(self, key: BlockKey, parent: BlockKey | None, newest: int) -> None:
        row = self._tree.enter(key, parent)
        if not row:
            return
        if key in self._held:
            self._older[row] = self._newer[row] = row
            return
        above = self._tree.parents[row]
        beside = self._tree.here[above] and self._newer[above] != above
        self._link(row, above if beside else newest)

    def _link(self, row: int, above: int) -> None:
        """Put a row on the older side of `above`, which is in the ring."""
        older, newer = self._older, self._newer
        below = older[above]
        newer[row], older[row] = above, below
        newer[below] = older[above] = row

    def _link_after(self, above: int, rows: range) -> None:
        """Do what `_link` does with each of these rows, beside the one before it. The first one is
        the next after `above`, which is in the ring."""
        older, newer, last = self._older, self._newer, rows[-1]
        below = older[above]
        newer[rows.start : rows.stop] = array("I", range(above, last))
        older[above:last] = array("I", rows)
        older[last], newer[below] = below, last

    def _unlink(self, row: int) -> None:
        """Take a row out of the ring; its own links stay, for whoever is walking there."""
        above, below = self._newer[row], self._older[row]
        self._newer[below], self._older[above] = above, below
