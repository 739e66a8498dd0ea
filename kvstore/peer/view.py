"""What is known of the heads of all peers: one sorted table, and what changed since it was made.

A lookup takes a binary search for each head of a prefix, however many peers there are. Changes go
into a small dictionary, which is merged into the table now and then: 10 bytes a head.
"""

from __future__ import annotations

import asyncio
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTES_A_HEAD = 10
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
STEP = 1 << 16  # entries of a table that are merged at once
PENDING_MAX = 1 << 15  # changes, before the table is made anew: 0.13 s of a thread for 6 M heads

Numbers = NDArray[np.uint64]
Places = NDArray[np.uint16]
Indices = NDArray[np.intp]
Kept = Callable[[int, int], NDArray[np.bool_]]
"""Says which entries of a part of a table are kept."""
_Make = Callable[[], tuple[Numbers, Places]]  # a table anew: on any thread


class Holder(NamedTuple):
    """A peer that seems to have so many heads of a prefix."""

    place: int
    heads: int


class _Changes(NamedTuple):
    """What one answer of a peer said."""

    place: int
    heads: Numbers
    came: bytes


class View:
    """The heads of peers, each known by a place: a number below 65,536."""

    def __init__(self) -> None:
        self._heads: Numbers = np.empty(0, np.uint64)
        self._places: Places = np.empty(0, np.uint16)
        self._came: dict[int, set[int]] = {}  # since the table was made; it may have them, too
        self._left: set[tuple[int, int]] = set()  # whether the table has them or not
        self._meanwhile: list[_Changes] | None = None  # changes while the others are merged
        self._making = asyncio.Lock()

    def __len__(self) -> int:
        """About how many heads are known: exact once `settle` has put all changes into the table.
        Until then one that came again counts twice, and one that left again is taken off twice."""
        return max(0, len(self._heads) + sum(map(len, self._came.values())) - len(self._left))

    @property
    def nbytes(self) -> int:
        """What the table takes."""
        return self._heads.nbytes + self._places.nbytes

    @property
    def pending(self) -> int:
        """How many changes are not in the table, and are not being merged into it."""
        return 0 if self._meanwhile is not None else len(self._came) + len(self._left)

    def change(self, place: int, heads: Numbers, came: bytes) -> None:
        """Note that a peer has heads, or has them no more, in this order. came: 1 or 0 for each.

        Whether the table has them is looked up when it is made anew, in a thread: a search in
        millions of heads waits for memory, here for each change.
        """
        if self._meanwhile is not None:
            self._meanwhile.append(_Changes(place, heads, came))
        for head, comes in zip(heads.tolist(), came, strict=True):
            if comes:
                self._left.discard((head, place))
                self._came.setdefault(head, set()).add(place)
                continue
            self._left.add((head, place))
            places = self._came.get(head)
            if places is not None:
                places.discard(place)
                if not places:
                    del self._came[head]

    async def replace(self, place: int, heads: Numbers) -> None:
        """Take a snapshot of a peer in the place of all that was known of it."""
        await self._replace((place,), heads, np.full(len(heads), place, np.uint16))

    async def forget(self, *places: int) -> None:
        """Drop what is known of peers."""
        await self._replace(places, np.empty(0, np.uint64), np.empty(0, np.uint16))

    async def _replace(self, gone: Sequence[int], heads: Numbers, places: Places) -> None:
        """Drop what is known of some peers, then take heads."""
        async with self._making:
            made = self._replacing(gone, heads, places)
            self._heads, self._places = await asyncio.to_thread(made)

    def replace_at_once(self, place: int, heads: Numbers) -> None:
        """Take a snapshot of a peer where nothing else goes on: in a replay."""
        places = np.full(len(heads), place, np.uint16)
        self._heads, self._places = self._replacing((place,), heads, places)()

    def _replacing(self, gone: Sequence[int], heads: Numbers, places: Places) -> _Make:
        self._drop_changes({*gone})
        before = self._heads, self._places

        def made() -> tuple[Numbers, Places]:
            def kept(begin: int, end: int) -> NDArray[np.bool_]:
                return ~np.isin(before[1][begin:end], gone)

            return _merged(*before, kept, heads, places)

        return made

    async def settle(self, above: int = 0) -> None:
        """Put the changes into the table, if there are more than so many when it is its turn.
        Lookups and changes go on meanwhile."""
        async with self._making:
            if self.pending <= above:
                return
            made = self._settling()
            self._meanwhile = []
            try:
                self._heads, self._places = await asyncio.to_thread(made)
                self._came, self._left = {}, set()
            finally:
                meanwhile, self._meanwhile = self._meanwhile, None
            for each in meanwhile:
                self.change(*each)

    def settle_at_once(self) -> None:
        """Put the changes into the table where nothing else goes on: in a replay."""
        self._heads, self._places = self._settling()()
        self._came, self._left = {}, set()

    def _settling(self) -> _Make:
        before = self._heads, self._places
        came = [(head, place) for head, at in self._came.items() for place in at]
        left = list(self._left)

        def made() -> tuple[Numbers, Places]:
            kept = np.ones(len(before[0]), bool)
            gone = _find(*before, *_columns(left))
            kept[gone[gone >= 0]] = False
            heads, places = _columns(came)
            new = _find(*before, heads, places) < 0
            return _merged(*before, lambda a, b: kept[a:b], heads[new], places[new])

        return made

    def knows(self, heads: Sequence[int]) -> bool:
        """Say whether any peer seems to have any of these heads."""
        if self._came and not self._came.keys().isdisjoint(heads):
            return True
        if len(heads) == 1:
            return self._has(heads[0])
        return bool(self._look_up(heads)[1].any())

    def _has(self, head: int) -> bool:
        """Say whether the table has a head. Where the processor has other things in its caches, as
        between two requests, numpy would take four times as long for one."""
        table = self._heads.data
        at = bisect_left(table, head)
        return at < len(table) and table[at] == head

    def holders(self, heads: Sequence[int], most: int, beyond: int = 0) -> list[Holder]:
        """Return at most so many peers that have more than `beyond` heads of a prefix, the longest
        first."""
        begins, there = self._look_up(heads)
        if not self._came and not there.any():
            return []
        ends = np.searchsorted(self._heads, self._heads[begins[there]], "right")
        end_of = dict(zip(np.flatnonzero(there).tolist(), ends.tolist(), strict=True))
        found: dict[int, int] = {}
        for at in range(len(heads) - 1, beyond - 1, -1):
            places: Iterable[int] = self._came.get(heads[at], ()) if self._came else ()
            if at in end_of:
                table = self._places[begins[at] : end_of[at]].tolist()
                gone = self._left
                places = [*places, *(p for p in table if not gone or (heads[at], p) not in gone)]
            for place in places:
                found.setdefault(place, at + 1)
            if len(found) >= most:
                break
        return [Holder(place, count) for place, count in found.items()][:most]

    def _look_up(self, heads: Sequence[int]) -> tuple[Indices, NDArray[np.bool_]]:
        """Return where each head is in the table, or would be, and whether it is there. One search
        for each: it waits for memory a dozen times."""
        wanted = np.array(heads, dtype=np.uint64)
        at = np.searchsorted(self._heads, wanted)
        if not len(self._heads):
            return at, np.zeros(len(wanted), bool)
        return at, self._heads.take(at, mode="clip") == wanted

    def _drop_changes(self, gone: set[int]) -> None:
        self._left = {each for each in self._left if each[1] not in gone}
        for head in [head for head, places in self._came.items() if places & gone]:
            self._came[head] -= gone
            if not self._came[head]:
                del self._came[head]


def _find(heads: Numbers, places: Places, wanted: Numbers, of: Places) -> Indices:
    """Return where a table has heads of a place for each; -1: nowhere."""
    found = np.full(len(wanted), -1, np.intp)
    if not len(heads):
        return found
    begins = np.searchsorted(heads, wanted, "left")
    there = np.flatnonzero(heads.take(begins, mode="clip") == wanted)
    same = places[begins[there]] == of[there]  # most heads are of one peer
    found[there[same]] = begins[there[same]]
    for at in there[~same]:
        end = np.searchsorted(heads, wanted[at], "right")
        others = np.flatnonzero(places[begins[at] : end] == of[at])
        if len(others):
            found[at] = begins[at] + others[0]
    return found


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Numbers, Places]:
    """Return heads and places of pairs."""
    heads = np.fromiter((head for head, _ in pairs), np.uint64, len(pairs))
    return heads, np.fromiter((place for _, place in pairs), np.uint16, len(pairs))


def _merged(
    heads: Numbers, places: Places, kept: Kept, more_heads: Numbers, more_places: Places
) -> tuple[Numbers, Places]:
    """Return what is kept of a table, and more of it in any order, as one.

    It is made in steps, so that the only large memory is that of the new table.
    """
    order = np.argsort(more_heads, kind="stable")
    more_heads, more_places = more_heads[order], more_places[order]
    at = np.searchsorted(heads, more_heads)
    new_heads, new_places = _room(len(heads) + len(more_heads))
    count = 0
    for begin in range(0, max(1, len(heads)), STEP):
        end = begin + STEP
        first, last = np.searchsorted(at, (begin, end if end < len(heads) else len(heads) + 1))
        keep = kept(begin, end)
        before = np.concatenate(([0], np.cumsum(keep)))[at[first:last] - begin]
        piece = np.insert(heads[begin:end][keep], before, more_heads[first:last])
        new_heads[count : count + len(piece)] = piece
        new_places[count : count + len(piece)] = np.insert(
            places[begin:end][keep], before, more_places[first:last]
        )
        count += len(piece)
    return new_heads[:count], new_places[:count]


def _room(count: int) -> tuple[Numbers, Places]:
    """Return room for a table, in pages of its own. malloc would keep those of several tables."""
    pages = [mmap.mmap(-1, max(1, count) * nbytes, PRIVATE) for nbytes in (8, 2)]
    return np.frombuffer(pages[0], np.uint64), np.frombuffer(pages[1], np.uint16)
