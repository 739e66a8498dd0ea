"""The tree of prefixes, drawn from what is stored: runs of blocks, not blocks.

A block whose parent is stored and has no other child is of the parent's run. Keys are names of 8
bytes here, which are hashes; a parent counts as one only if it is one block before in the same
namespace, so blocks that were made up form no cycle. All arithmetic is numpy's, over whole arrays:
a million blocks take a second in a thread, and the interpreter is free for most of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.decide.index import StoredBlock
from kvstore.decide.uses import NAME_NBYTES, Use
from kvstore.model.block import KEY_NBYTES, NamespaceId, padded

Numbers: TypeAlias = "np.ndarray[Any, Any]"
DEPTH_MAX = 512  # runs behind one another, that are summed up level by level
CURSOR = np.dtype([("nbytes", "<u8"), ("name", "<u8")])


class Blocks:
    """What is known of blocks, in columns: `add` some at a turn."""

    def __init__(self) -> None:
        self.namespaces: list[NamespaceId] = []
        self.keys = bytearray()
        self.parents = bytearray()
        self.places = array("I")
        self.spaces = array("I")
        self.dram = array("Q")
        self.file = array("Q")
        self._spaces: dict[NamespaceId, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    def add(self, blocks: Iterable[StoredBlock]) -> None:
        """Look at blocks. One that left meanwhile is passed over."""
        nothing = bytes(NAME_NBYTES)
        for block in blocks:
            dram = file = 0
            for record in (records := block.records):
                if record.resident is not None:
                    dram += padded(record.nbytes)
                if record.frame is not None:
                    file += padded(record.frame.stored_nbytes[record.position])
            if not records or len(block.key) != KEY_NBYTES:
                continue
            space = self._spaces.get(block.namespace_id)
            if space is None:
                space = self._spaces[block.namespace_id] = len(self.namespaces)
                self.namespaces.append(block.namespace_id)
            self.keys += block.key
            self.parents += nothing if block.parent is None else block.parent[:NAME_NBYTES]
            self.places.append(block.block_index)
            self.spaces.append(space)
            self.dram.append(dram)
            self.file.append(file)


class Run(NamedTuple):
    """Blocks [begin, end) of a prefix; dram, file: bytes of its own; all_...: with all behind it.
    parent: number of the run before it, -1 for none. at: when it was used last, -1: not known."""

    number: int
    parent: int
    first_key: bytes
    last_key: bytes
    namespace: int
    begin: int
    end: int
    children: int
    dram: int
    file: int
    blocks: int
    all_dram: int
    all_file: int
    hits: int
    at: float


class Runs:
    """The tree. Made on any thread; looking into it costs by the size of the answer."""

    def __init__(self, blocks: Blocks, uses: Sequence[tuple[bytes, Use]]) -> None:
        self.namespaces = blocks.namespaces
        self.blocks = len(blocks)
        keys = np.frombuffer(blocks.keys, np.uint8).reshape(-1, KEY_NBYTES)
        names = np.ascontiguousarray(keys[:, :NAME_NBYTES]).view("<u8").ravel()
        places, spaces = np.array(blocks.places), np.array(blocks.spaces)
        order = np.argsort(names, kind="stable")
        self._names = names[order]
        above = self._parents(names, order, places, spaces, blocks.parents)
        children = np.bincount(above[above >= 0], minlength=len(names))
        heads = np.flatnonzero((above < 0) | (children[above] != 1))
        run = _runs_of(above, heads)
        self._run = run[order].astype(np.int32)
        tails = np.empty(len(heads), np.int64)
        ends = np.flatnonzero(children != 1)
        tails[run[ends]] = ends
        self._first, self._last = keys[heads], keys[tails]
        self._space, self._begin = spaces[heads], places[heads]
        self._parent = np.where(above[heads] >= 0, run[above[heads]], -1)
        self._counts = {
            "own": np.bincount(run, minlength=len(heads)),
            "dram": _added(run, blocks.dram, len(heads)),
            "file": _added(run, blocks.file, len(heads)),
        }
        self._children = np.bincount(self._parent[self._parent >= 0], minlength=len(heads))
        self._sum_up(uses)
        self._sort(names[heads])

    def find(self, key: bytes) -> int | None:
        """Return the number of the run that has a block."""
        name = int.from_bytes(key[:NAME_NBYTES], "little")
        at = int(np.searchsorted(self._names, np.uint64(name)))
        found = at < len(self._names) and int(self._names[at]) == name
        return int(self._run[at]) if found else None

    def path(self, number: int) -> list[int]:
        """Return the runs from the start of a prefix to this one."""
        path = [number]
        while (above := int(self._parent[path[-1]])) >= 0:
            path.append(above)
        return path[::-1]

    def children(
        self, number: int, most: int, *, after: bytes = b"", space: int | None = None
    ) -> tuple[list[int], bytes]:
        """Return the runs that go on from one, -1: the starts of all prefixes; those with most
        bytes first, `most` of them, and where to go on if there are more. space: of one
        namespace."""
        begin, end = np.searchsorted(self._sorted_parent, [number, number + 1])
        found = self._sorted[begin:end]
        if space is not None:
            found = found[self._space[found] == space]
        if len(after) == CURSOR.itemsize:
            nbytes, name = np.frombuffer(after, CURSOR)[0]
            theirs, names = self._nbytes[found], self._name[found]
            found = found[(theirs < nbytes) | ((theirs == nbytes) & (names > name))]
        more = b""
        if len(found) > most:
            last = found[most - 1]
            more = np.array([(self._nbytes[last], self._name[last])], CURSOR).tobytes()
        return found[:most].tolist(), more

    def look(self, numbers: Sequence[int]) -> list[Run]:
        """Return what there is to say of runs."""
        at = np.asarray(numbers, np.int64)
        begin, own = self._begin[at].astype(np.int64), self._counts["own"][at]
        columns = (
            at,
            self._parent[at],
            self._space[at],
            begin,
            begin + own,
            self._children[at],
            self._counts["dram"][at],
            self._counts["file"][at],
            self._all["own"][at],
            self._all["dram"][at],
            self._all["file"][at],
            self._hits[at],
            self._used_at[at],
        )
        first, last = self._first[at], self._last[at]
        return [
            Run(row[0], row[1], first[i].tobytes(), last[i].tobytes(), *row[2:])
            for i, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))
        ]

    def _parents(
        self, names: Numbers, order: Numbers, places: Numbers, spaces: Numbers, parents: bytearray
    ) -> Numbers:
        """Return the place of each block's parent, -1 where it is not stored."""
        if not len(names):
            return np.empty(0, np.int64)
        wanted = np.frombuffer(parents, "<u8")
        at = np.minimum(np.searchsorted(self._names, wanted), len(names) - 1)
        above = order[at]
        is_parent = (
            (self._names[at] == wanted)
            & (wanted != 0)
            & (places[above].astype(np.int64) + 1 == places)
            & (spaces[above] == spaces)
        )
        return np.where(is_parent, above, -1)

    def _sum_up(self, uses: Sequence[tuple[bytes, Use]]) -> None:
        """Add to each run what is behind it, from the ends to the starts."""
        runs = len(self._parent)
        self._hits, self._used_at = np.zeros(runs, np.int64), np.full(runs, -1.0)
        self._note_uses(uses)
        self._all = {name: counts.copy() for name, counts in self._counts.items()}
        totals = (*self._all.values(), self._hits)
        depth, above, steps = np.zeros(runs, np.int64), self._parent, 0
        while (alive := above >= 0).any():
            if (steps := steps + 1) > DEPTH_MAX:
                self._sum_up_one_by_one(totals)
                return
            depth += alive
            above = np.where(alive, self._parent[above], -1)
        by_depth = np.argsort(depth, kind="stable")
        bounds = np.searchsorted(depth[by_depth], np.arange(depth.max(initial=0) + 2))
        for level in range(len(bounds) - 2, 0, -1):
            these = by_depth[bounds[level] : bounds[level + 1]]
            parents = self._parent[these]
            for total in totals:
                np.add.at(total, parents, total[these])
            np.maximum.at(self._used_at, parents, self._used_at[these])

    def _sum_up_one_by_one(self, totals: Sequence[Numbers]) -> None:
        """The same for a tree so deep that looking at all runs at each depth would take longer."""
        parents = self._parent.tolist()
        order = [n for n in np.argsort(self._begin)[::-1].tolist() if parents[n] >= 0]
        for total in totals:
            sums = total.tolist()
            for number in order:
                sums[parents[number]] += sums[number]
            total[:] = sums
        for number in order:
            above = parents[number]
            self._used_at[above] = max(self._used_at[above], self._used_at[number])

    def _note_uses(self, uses: Sequence[tuple[bytes, Use]]) -> None:
        """Give each use to the run that has the last block it was of, of those that are stored."""
        if not uses or not len(self._names):
            return
        names = np.frombuffer(b"".join(name for name, _ in uses), "<u8")
        places = np.minimum(np.searchsorted(self._names, names), len(self._names) - 1)
        numbers = np.where(self._names[places] == names, self._run[places], -1).tolist()
        for place, (_, use) in enumerate(uses):
            if numbers[place] < 0:
                found = (number for key in use.before if (number := self.find(key)) is not None)
                numbers[place] = next(found, -1)
        hits = np.array([use.hits for _, use in uses])
        at = np.array([use.at for _, use in uses])
        owners = np.array(numbers)
        known = owners >= 0
        np.add.at(self._hits, owners[known], hits[known])
        np.maximum.at(self._used_at, owners[known], at[known])

    def _sort(self, names: Numbers) -> None:
        self._name = names
        self._nbytes = (self._all["dram"] + self._all["file"]).astype(np.uint64)
        self._sorted = np.lexsort((names, -self._nbytes.astype(np.int64), self._parent))
        self._sorted_parent = self._parent[self._sorted]


def _runs_of(above: Numbers, heads: Numbers) -> Numbers:
    """Return the number of each block's run: that of its head. Every step looks twice as far."""
    own = np.arange(len(above))
    head = above.copy()
    head[heads] = heads
    while True:
        further = head[head]
        if np.array_equal(further, head):
            break
        head = further
    numbers = np.empty(len(own), np.int64)
    numbers[heads] = np.arange(len(heads))
    return numbers[head] if len(own) else numbers


def _added(run: Numbers, nbytes: Iterable[int], runs: int) -> Numbers:
    total = np.zeros(runs, np.int64)
    np.add.at(total, run, np.array(nbytes, np.int64))
    return total
