"""A number for each block, by which the index and the policies keep what they know in arrays.

Ten million blocks as objects are gigabytes, and every one of them is looked at by the garbage
collector. So what is known of a block is a row of columns (`array`): a few dozen bytes that nobody
has to walk over. The number of a row is found by the key of its block, in one table for all who
keep columns, because a key and its place in a table take more memory than all the rest. A row is
used again when nobody keeps it any more.

Nothing grows in one large step. Beyond SPLIT_ROWS there are SHARDS small tables, each of which is
rebuilt on its own: below, one table is faster, because it has the blocks of a prefix side by side.
Columns grow by a few rows: `array` and `list` ask for more memory in small steps as well, and large
ones are moved by the kernel, page by page, without a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np

from kvstore.model.block import BlockKey

SHARDS = 256
SPLIT_ROWS = 80_000  # of one table, when it is split: that takes 10 ms
_STEP_BITS = 10
STEP_ROWS = 1 << _STEP_BITS  # by so many rows all columns grow
_STEP_MASK = STEP_ROWS - 1
FIRST_ROW = 2
"""Rows 0 and 1 are no block's: whoever keeps columns may use them for marks of its own."""
KEEPERS_MAX = 8
_NOBODY = BlockKey(b"")

T = TypeVar("T")


class Objects(Generic[T]):
    """An object for each row, None at first. numpy's arrays are no containers to the garbage
    collector, which would look at all items of a list."""

    __slots__ = ("_chunks",)

    def __init__(self, rows: int) -> None:
        self._chunks: list[Any] = []
        self.extend(rows)

    def __getitem__(self, row: int) -> T:
        return self._chunks[row >> _STEP_BITS][row & _STEP_MASK]  # type: ignore[no-any-return]

    def __setitem__(self, row: int, item: T) -> None:
        self._chunks[row >> _STEP_BITS][row & _STEP_MASK] = item

    def put(self, begin: int, items: Sequence[T]) -> None:
        """Set those of a run of rows."""
        end = begin + len(items)
        for step in range(begin >> _STEP_BITS, (end - 1 >> _STEP_BITS) + 1):
            first = step << _STEP_BITS
            some = items[max(0, first - begin) : first + STEP_ROWS - begin]
            at = max(0, begin - first)
            self._chunks[step][at : at + len(some)] = some

    def run(self, begin: int, count: int) -> list[T]:
        """Return those of a run of rows, as far as they are of one step."""
        at = begin & _STEP_MASK
        return self._chunks[begin >> _STEP_BITS][at : at + count].tolist()  # type: ignore[no-any-return]

    def extend(self, rows: int) -> None:
        """Add rows, whole steps of them."""
        self._chunks += [np.full(STEP_ROWS, None, object) for _ in range(rows // STEP_ROWS)]


@dataclass(slots=True)
class _Retired:
    """A keeper who has left. Nobody drops his rows [at, end) yet."""

    keeper: int
    end: int
    at: int = FIRST_ROW


class Rows:
    """The rows of one node. A row lives while somebody keeps it: see `keeper`.

    shards: the tables, by the last byte of a key. keys, kept_by: of each row its key, and the bits
    of its keepers. with_order: one table has all rows for ever, in the order in which they came.
    """

    __slots__ = (
        "_columns",
        "_free",
        "_keepers",
        "_next",
        "_objects",
        "_retired",
        "_rows",
        "_splits",
        "kept_by",
        "keys",
        "shards",
    )

    def __init__(self, *, with_order: bool = False) -> None:
        self.shards: list[dict[BlockKey, int]] = [{}] * SHARDS
        self._splits = not with_order
        self.keys: Objects[BlockKey] = Objects(0)
        self._rows = 0
        self._columns: list[tuple[Any, Any]] = []  # and what is added to each for a step of rows
        self._objects: list[Objects[Any]] = []
        self.kept_by = self.flags()
        self._keepers = 0
        self._retired: list[_Retired] = []
        self._free = array("I")
        self._next = FIRST_ROW
        self._grow()

    def __len__(self) -> int:
        """Return how many rows there are, used or not."""
        return self._rows

    @property
    def end(self) -> int:
        """All rows that were ever used come before this one."""
        return self._next

    def column(self, typecode: str) -> array[Any]:
        """Return an array with an item for each row there is or will be, all 0 at first.

        Whoever keeps rows sets its items when it begins to keep one.
        """
        made = array(typecode, bytes(array(typecode).itemsize * self._rows))
        self._columns.append((made, array(typecode, bytes(made.itemsize * STEP_ROWS))))
        return made

    def flags(self) -> bytearray:
        """The same for numbers of a byte, which is a third faster than an array of them."""
        made = bytearray(self._rows)
        self._columns.append((made, bytes(STEP_ROWS)))
        return made

    def objects(self) -> Objects[Any]:
        """The same for objects, None at first: keys, and what else cannot be part of a cycle."""
        made: Objects[Any] = Objects(self._rows)
        self._objects.append(made)
        return made

    def keeper(self) -> int:
        """Return the bit of a new keeper of rows."""
        for number in range(KEEPERS_MAX):
            if not self._keepers >> number & 1:
                self._keepers |= 1 << number
                return 1 << number
        raise RuntimeError(f"more than {KEEPERS_MAX} keepers of rows")

    def find(self, key: BlockKey) -> int:
        """Return the row of a block, 0 if nobody keeps one."""
        return self.shards[key[-1]].get(key, 0)

    def find_all(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return `find` of every key."""
        shards = self.shards
        if shards[0] is shards[1]:  # one table: at the speed of C
            return list(map(shards[0].get, keys, repeat(0)))
        return [shards[key[-1]].get(key, 0) for key in keys]

    def keep(self, key: BlockKey, keeper: int) -> int:
        """Return the row of a block, a new one if need be, and keep it."""
        shard = self.shards[key[-1]]
        row = shard.get(key, 0)
        if row:
            kept = self.kept_by[row]
            if not kept & keeper:
                self.kept_by[row] = kept | keeper
            return row
        if self._free:
            row = self._free.pop()
        else:
            row = self._next
            if row >= self._rows:
                self._grow()
                shard = self.shards[key[-1]]  # it may be another one now
            self._next = row + 1
        shard[key] = row
        self.keys[row] = key
        self.kept_by[row] = keeper
        return row

    def keep_new(self, keys: Sequence[BlockKey], keeper: int) -> range | None:
        """Keep rows for some blocks, one after the other. None: a key comes twice, or has a row,
        or there are rows to be used again; then nothing has changed."""
        if self._free:
            return None
        while self._rows - self._next < len(keys):
            self._grow()
        rows = range(self._next, self._next + len(keys))
        shards = self.shards
        for key, row in zip(keys, rows, strict=True):
            if shards[key[-1]].setdefault(key, row) != row:
                for other in keys[: row - rows.start]:
                    del shards[other[-1]][other]
                return None
        self._next = rows.stop
        self.keys.put(rows.start, keys)
        self.kept_by[rows.start : rows.stop] = bytes((keeper,)) * len(keys)
        return rows

    def drop(self, row: int, keeper: int) -> None:
        """Keep a row no longer. The last one to drop it frees it."""
        kept = self.kept_by[row] & ~keeper
        self.kept_by[row] = kept
        if not kept:
            key = self.keys[row]
            del self.shards[key[-1]][key]
            self.keys[row] = _NOBODY
            self._free.append(row)

    def kept(self, keeper: int) -> Iterator[int]:
        """Yield the rows of a keeper. Rows may come and go meanwhile."""
        kept, keys = self.kept_by, self.keys
        for shard in {id(shard): shard for shard in self.shards}.values():
            for key, row in list(shard.items()):
                if kept[row] & keeper and keys[row] is key:
                    yield row

    def some(self, keeper: int, begin: int, end: int) -> list[int]:
        """Return which of the rows [begin, end) a keeper has. A block keeps its row for as long as
        somebody keeps it, so who goes on from row to row meets all that stay."""
        kept = self.kept_by[begin : min(end, self._next)]
        return [row for row, keepers in enumerate(kept, begin) if keepers & keeper]

    def tables(self, first: int) -> Iterator[tuple[int | None, list[BlockKey]]]:
        """Yield the last byte and the keys of each table, from that of a last byte on, as they are
        by then. None: there is one table for all, of few rows."""
        shards = self.shards
        if shards[0] is shards[1]:
            yield None, list(shards[0])
            return
        for last in range(first, SHARDS):
            yield last, list(shards[last])

    def retire(self, keeper: int, columns: Sequence[object]) -> None:
        """Drop the columns of a keeper, who uses none of its rows any more: `sweep` drops them."""
        self._retired.append(_Retired(keeper, self._next))
        gone = {id(column) for column in columns}
        self._columns = [each for each in self._columns if id(each[0]) not in gone]

    def sweep(self, most: int) -> bool:
        """Look at so many rows, and drop what a keeper has who retired. False: that is all."""
        if not self._retired:
            return False
        retired = self._retired[0]
        begin, retired.at = retired.at, min(retired.at + most, retired.end)
        for row in self.some(retired.keeper, begin, retired.at):
            self.drop(row, retired.keeper)
        if retired.at == retired.end:
            self._keepers &= ~retired.keeper
            del self._retired[0]
        return bool(self._retired)

    def _grow(self) -> None:
        for column, nothing in self._columns:
            column.extend(nothing)
        for objects in (self.keys, *self._objects):
            objects.extend(STEP_ROWS)
        self._rows += STEP_ROWS
        if self._splits and len(self.shards[0]) >= SPLIT_ROWS:
            self._split()

    def _split(self) -> None:
        """Let each last byte of a key have a table of its own. The list stays the same one: others
        may have it in their hands."""
        self._splits = False
        table = self.shards[0]
        self.shards[:] = [{} for _ in range(SHARDS)]
        for key, row in table.items():
            self.shards[key[-1]][key] = row
