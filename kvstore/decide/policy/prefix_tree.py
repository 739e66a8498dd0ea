"""Which block comes before which, so that a parent never leaves before its children.

A row lives while its block is here, or while a child of it is: a block that comes back after its
children (reads of another prefix may bring those up first) finds them again. Keys are hashes of
what comes before them, so honest prefixes form no cycle; blocks of one that was made up would hold
each other for ever, and therefore have no parent here.

All of it is columns, by the rows that the index finds its blocks by (`rows.py`): 9 bytes a block
instead of an object and a place in a table of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey


class PrefixTree:
    """The blocks of one tier. Every operation is O(1), but for a block that comes back after its
    children: O(depth).

    here: 1 for a block of the tier. children: how many it has here. parents: their row, 0 for none.
    rows: shared with whoever else keeps columns; None: its own.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = rows if rows is not None else Rows()
        self._keeper, self._kept_by = self.rows.keeper(), self.rows.kept_by
        self._with_me = bytes(kept | self._keeper for kept in range(256))
        self._without_me = bytes(kept & ~self._keeper for kept in range(256))
        self._columns: list[object] = []
        self.here = self.flags()
        self.children = self.column("I")
        self.parents = self.column("I")
        self.blocks = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the rows of the blocks that are here."""
        return (row for row in self.rows.kept(self._keeper) if self.here[row])

    def column(self, typecode: str) -> array[Any]:
        """Return a column for what a policy knows of its blocks, all 0 at first."""
        made = self.rows.column(typecode)
        self._columns.append(made)
        return made

    def flags(self) -> bytearray:
        """The same for numbers of a byte."""
        made = self.rows.flags()
        self._columns.append(made)
        return made

    def find(self, key: BlockKey) -> int:
        """Return the row of a block that is here, else 0."""
        row = self.rows.shards[key[-1]].get(key, 0)
        return row if self.here[row] else 0

    def enter(self, key: BlockKey, parent: BlockKey | None) -> int:
        """Add a block and return its row; 0: it is here already."""
        shards, kept_by = self.rows.shards, self._kept_by
        row = shards[key[-1]].get(key, 0)
        if row:  # it is in the index, most of the time
            if self.here[row]:
                return 0
            kept_by[row] |= self._keeper
        else:
            row = self.rows.keep(key, self._keeper)
        self.here[row] = 1
        self.blocks += 1
        if parent is not None and parent != key:
            above = shards[parent[-1]].get(parent, 0)
            if not kept_by[above] & self._keeper:
                above = self.rows.keep(parent, self._keeper)
            if not self.children[row] or not self._descends(above, row):
                self.parents[row] = above
                self.children[above] += 1
        return row

    def enter_after(self, row: int, keys: Sequence[BlockKey]) -> range | None:
        """Add blocks each of which follows the one before it, the first of them the block of `row`;
        return their rows. None: nothing has changed, because one of them is known here, or because
        their rows are not the next ones, as those of blocks that came together mostly are."""
        count = len(keys)
        rows = range(row + 1, row + 1 + count)
        at = slice(rows.start, rows.stop)
        kept_by = self._kept_by[at]
        if self.rows.keys.run(rows.start, count) != keys:
            return None
        if kept_by.translate(self._without_me) != kept_by:
            return None
        self._kept_by[at] = kept_by.translate(self._with_me)
        self.here[at] = b"\1" * count
        self.parents[at] = array("I", range(row, row + count))
        self.children[row] += 1
        self.children[rows.start : rows.stop - 1] = array("I", [1]) * (count - 1)
        self.blocks += count
        return rows

    def leave(self, row: int) -> int:
        """Remove a block that is here; return the row of its parent, 0 for none."""
        self.here[row] = 0
        self.blocks -= 1
        above: int = self.parents[row]
        self.parents[row] = 0
        if not self.children[row]:
            self.drop(row)
        if above:
            self.children[above] -= 1
            if not self.children[above] and not self.here[above]:
                self.drop(above)
        return above

    def hold(self, key: BlockKey) -> int:
        """Give a block a child that is not there, until `let_go`: it is no leaf meanwhile, whether
        it is here or not. Returns its row."""
        row = self.rows.keep(key, self._keeper)
        self.children[row] += 1
        return row

    def let_go(self, key: BlockKey) -> int:
        """Undo one `hold`; returns the row."""
        row = self.rows.find(key)
        self.children[row] -= 1
        if not self.children[row] and not self.here[row]:
            self.drop(row)
        return row

    def drop(self, row: int) -> None:
        """Give a row back that is no block's here, and no parent's."""
        self.rows.drop(row, self._keeper)

    def retire(self) -> None:
        """Give everything back: the tree is not used any more. See `Rows.sweep`."""
        self.rows.retire(self._keeper, self._columns)

    def _descends(self, row: int, ancestor: int) -> bool:
        """Say whether `ancestor` is `row` or comes before it."""
        while row:
            if row == ancestor:
                return True
            row = self.parents[row]
        return False
