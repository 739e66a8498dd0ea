"""What is known of the heads of all peers: one sorted table, and what changed since it was made.

A lookup takes a binary search for each head of a prefix, however many peers there are. Changes go
into a small dictionary, which is merged into the table now and then: 10 bytes a head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTES_A_HEAD = 10
PENDING_MAX = 1 << 14  # changes, before the table is made anew

Numbers = NDArray[np.uint64]
Places = NDArray[np.uint16]


class Holder(NamedTuple):
    """A peer that seems to have so many heads of a prefix."""

    place: int
    heads: int


class View:
    """The heads of peers, each known by a place: a number below 65,536."""

    def __init__(self) -> None:
        self._heads: Numbers = np.empty(0, np.uint64)
        self._places: Places = np.empty(0, np.uint16)
        self._came: dict[int, set[int]] = {}
        self._left: set[tuple[int, int]] = set()
        self._making = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._heads) + sum(map(len, self._came.values())) - len(self._left)

    @property
    def nbytes(self) -> int:
        """What the table takes."""
        return self._heads.nbytes + self._places.nbytes

    @property
    def pending(self) -> int:
        """How many changes are not in the table."""
        return len(self._came) + len(self._left)

    def change(self, place: int, head: int, *, came: bool) -> None:
        """Note that a peer has a head, or has it no more."""
        if came:
            self._left.discard((head, place))
            if not self._in_table(head, place):
                self._came.setdefault(head, set()).add(place)
            return
        places = self._came.get(head)
        if places is not None:
            places.discard(place)
            if not places:
                del self._came[head]
        if self._in_table(head, place):
            self._left.add((head, place))

    async def replace(self, place: int, heads: Numbers) -> None:
        """Take a snapshot of a peer in the place of all that was known of it."""
        async with self._making:
            self._drop_changes(place)
            await self._make(self._places != place, np.sort(heads), place)

    async def forget(self, place: int) -> None:
        """Drop what is known of a peer."""
        await self.replace(place, np.empty(0, np.uint64))

    async def settle(self) -> None:
        """Put the changes into the table. Lookups go on; they may miss some meanwhile."""
        async with self._making:
            keep = np.ones(len(self._heads), bool)
            for head, place in self._left:
                begin, end = self._range(head)
                keep[begin:end] &= self._places[begin:end] != place
            pairs = sorted((head, place) for head, at in self._came.items() for place in at)
            self._came, self._left = {}, set()
            heads = np.array([head for head, _ in pairs], dtype=np.uint64)
            await self._make(keep, heads, np.array([at for _, at in pairs], dtype=np.uint16))

    def holders(self, heads: Sequence[int], most: int, beyond: int = 0) -> list[Holder]:
        """Return at most so many peers that have more than `beyond` heads of a prefix, the longest
        first."""
        wanted = np.array(heads, dtype=np.uint64)
        begins = np.searchsorted(self._heads, wanted, "left")
        ends = np.searchsorted(self._heads, wanted, "right")
        there = ends > begins
        found: dict[int, int] = {}
        for at in range(len(heads) - 1, beyond - 1, -1):
            places: Iterable[int] = self._came.get(heads[at], ()) if self._came else ()
            if there[at]:
                table = self._places[begins[at] : ends[at]].tolist()
                gone = self._left
                places = [*places, *(p for p in table if not gone or (heads[at], p) not in gone)]
            for place in places:
                found.setdefault(place, at + 1)
            if len(found) >= most:
                break
        return [Holder(place, count) for place, count in found.items()][:most]

    def _range(self, head: int) -> tuple[int, int]:
        number = np.uint64(head)
        begin = int(np.searchsorted(self._heads, number, "left"))
        return begin, int(np.searchsorted(self._heads, number, "right"))

    def _in_table(self, head: int, place: int) -> bool:
        begin, end = self._range(head)
        return bool((self._places[begin:end] == place).any())

    def _drop_changes(self, place: int) -> None:
        self._left = {each for each in self._left if each[1] != place}
        for head in [head for head, places in self._came.items() if place in places]:
            self._came[head].discard(place)
            if not self._came[head]:
                del self._came[head]

    async def _make(self, keep: NDArray[np.bool_], heads: Numbers, places: Places | int) -> None:
        """Make the table of what is kept of it, and of heads in ascending order."""
        before = self._heads, self._places

        def made() -> tuple[Numbers, Places]:
            kept_heads, kept_places = before[0][keep], before[1][keep]
            at = np.searchsorted(kept_heads, heads)
            own = np.broadcast_to(np.asarray(places, dtype=np.uint16), heads.shape)
            return np.insert(kept_heads, at, heads), np.insert(kept_places, at, own)

        self._heads, self._places = await asyncio.to_thread(made)
