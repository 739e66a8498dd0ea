"""Looks at all blocks of an index, a few in a step, so that nobody waits for it.

A step is a fraction of a millisecond, however many blocks there are. Who walks lets others run
between two steps: blocks come and go then. A block keeps its row for as long as it is in the index,
so a walk from row to row meets all that stay.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from kvstore.decide.resting import Resting
from kvstore.decide.rows import FIRST_ROW, Rows
from kvstore.model.block import BlockKey, NamespaceId

WALK_ROWS = 1024  # that one step looks at
ORDER_MAX = (1 << 32) - 1


class Walks:
    """Part of an index, which writes here. added: blocks, ever, modulo 2**32. orders: what it was
    when the block of a row came."""

    def __init__(self, rows: Rows, keeper: int, blocks: Resting) -> None:
        self.added = 0
        self.orders = rows.column("I")
        self._rows = rows
        self._keeper = keeper
        self._blocks = blocks

    def came(self, rows: range) -> None:
        """Note that new blocks came, in the order of their rows."""
        for row in rows:
            self.orders[row] = self.added = self.added + 1 & ORDER_MAX

    def steps(
        self, namespace_ids: Container[NamespaceId] | None = None, *, most: int = WALK_ROWS
    ) -> Iterator[list[BlockKey]]:
        """Yield the keys of all blocks, or of those of some namespaces, in no order, waking none:
        `most` of them in a step, or fewer, as a step looks at WALK_ROWS rows.

        Blocks may come and go between two steps. Those that stay all the while are yielded once;
        what is yielded last may have gone before the next step.
        """
        for rows in self._row_steps():
            keys = [
                self._rows.keys[row]
                for row in rows
                if namespace_ids is None or self._namespace_of(row) in namespace_ids
            ]
            yield keys[:most]
            for at in range(most, len(keys), most):
                yield keys[at : at + most]

    def _row_steps(self) -> Iterator[list[int]]:
        """Yield the rows that the index keeps, of WALK_ROWS at a time, up to the last one now."""
        rows = self._rows
        for begin in range(FIRST_ROW, rows.end, WALK_ROWS):
            yield rows.some(self._keeper, begin, begin + WALK_ROWS)

    def unwritten(self, came: int | None = None) -> Iterator[list[BlockKey]]:
        """Yield the keys of the blocks of which the arena alone may have a record, the oldest
        first, waking none. A step looks at WALK_ROWS rows; the first ones, which look for what is
        oldest, yield nothing. Of blocks, the same is true as in `steps`; those that come after the
        first step are left out, or after `added` was `came`."""
        orders, now = self.orders, self.added if came is None else came
        shapes, shape_of = self._blocks.shapes, self._blocks.shape_of
        found: list[int] = []  # a heap: when a block came, and its row
        for rows in self._row_steps():
            later = self.added - now & ORDER_MAX  # how many have come meanwhile
            for row in rows:
                shape = shapes[shape_of[row]]
                was_there = self.added - orders[row] & ORDER_MAX >= later
                if was_there and (shape is None or shape.has_unwritten):
                    age = now - orders[row] & ORDER_MAX
                    heappush(found, (ORDER_MAX - age) << 32 | row)
            yield []
        kept_by, keys = self._rows.kept_by, self._rows.keys
        while found:
            oldest = [heappop(found) for _ in range(min(len(found), WALK_ROWS >> 2))]
            yield [
                keys[row]
                for before, row in (divmod(each, 1 << 32) for each in oldest)
                if kept_by[row] & self._keeper
                and now - orders[row] & ORDER_MAX == ORDER_MAX - before
            ]

    def named(self) -> Iterator[tuple[BlockKey, NamespaceId]]:
        """Yield the key and the namespace of each block, in no order, waking none. They may come
        and go meanwhile, as in `steps`."""
        for rows in self._row_steps():
            yield from [(self._rows.keys[row], self._namespace_of(row)) for row in rows]

    def kept(
        self, keys: Sequence[BlockKey], namespace_ids: Container[NamespaceId] | None = None
    ) -> list[BlockKey]:
        """Return which keys are those of blocks, or of blocks of some namespaces, waking none."""
        kept_by, rows = self._rows.kept_by, self._rows.find_all(keys)
        found = zip(keys, rows, strict=True)
        if namespace_ids is None:
            return [key for key, row in found if kept_by[row] & self._keeper]
        return [
            key
            for key, row in found
            if kept_by[row] & self._keeper and self._namespace_of(row) in namespace_ids
        ]

    def parents(
        self, rows: Iterable[int], *, framed: bool
    ) -> Iterator[tuple[BlockKey, BlockKey | None]]:
        """Yield key and parent of the blocks of these rows that have a record in the arena, or, if
        `framed`, in a frame. It wakes none."""
        blocks, kept_by, keys = self._blocks, self._rows.kept_by, self._rows.keys
        for row in rows:
            if not kept_by[row] & self._keeper:
                continue
            each = blocks.shapes[blocks.shape_of[row]]
            if each is not None:
                if each.framed_parts if framed else each.resident_parts:
                    yield keys[row], blocks.parents[row]
                continue
            block = blocks.awake[row]
            if block.framed_parts if framed else block.resident_parts:
                yield block.key, block.parent

    def _namespace_of(self, row: int) -> NamespaceId:
        """Return the namespace of the block of a row that the index keeps."""
        each = self._blocks.shapes[self._blocks.shape_of[row]] or self._blocks.awake[row]
        return each.namespace_id
