"""The heads of this host in order, as of one moment, from which chunks of snapshots are cut.

To sort all heads costs as much for one chunk as for all of them. So what was sorted is kept while
somebody takes chunks of it, and what other hosts ask for within a second is cut from the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.decide.heads import Heads
from kvstore.peer.base import HEADS_MAX

SHARED_S = 1.0  # so old is what somebody gets at the most who begins with it
KEPT_S = 5.0  # after the last chunk


@dataclass(slots=True)
class Snapshot:
    """Heads of a level and higher ones. number: of the last change that is in it."""

    number: int
    ordered: npt.NDArray[np.uint64]
    made_at: float
    used_at: float

    def chunk(self, begin: int) -> tuple[bytes, int]:
        """Return heads from `begin` on, and the one with which the next chunk begins; 0: none."""
        first = int(np.searchsorted(self.ordered, np.uint64(begin)))
        last = first + HEADS_MAX
        cursor = int(self.ordered[last]) if last < len(self.ordered) else 0
        return self.ordered[first:last].astype("<u8").tobytes(), cursor


class HeadSnapshots:
    """now: seconds. sorted: how often all heads of a level were put in order."""

    def __init__(self, heads: Heads, now: Callable[[], float]) -> None:
        self.sorted = 0
        self._heads = heads
        self._now = now
        self._kept: dict[int, Snapshot] = {}
        self._making: dict[int, asyncio.Task[Snapshot]] = {}

    async def at(self, level: int, *, goes_on: bool) -> Snapshot:
        """Return the heads of a level. goes_on: for another chunk, of what may be older."""
        found, now = self._kept.get(level), self._now()
        if found is None or not self._is_good(found, goes_on=goes_on):
            making = self._making.get(level)
            if making is None:
                making = asyncio.get_running_loop().create_task(self._made(level))
                self._making[level] = making
                making.add_done_callback(lambda _: self._making.pop(level))
            found = await asyncio.shield(making)  # others wait for it as well
        found.used_at = now
        return found

    def _is_good(self, found: Snapshot, *, goes_on: bool) -> bool:
        if self._heads.since(found.number, 0) is None:  # what has changed since is not kept
            return False
        return goes_on or found.number == self._heads.number or self._age_s(found) < SHARED_S

    def _age_s(self, found: Snapshot) -> float:
        return self._now() - found.made_at

    async def _made(self, level: int) -> Snapshot:
        number, listed, now = self._heads.number, self._heads.at(level), self._now()
        ordered = await asyncio.to_thread(lambda: np.sort(np.array(listed, dtype=np.uint64)))
        self.sorted += 1
        made = self._kept[level] = Snapshot(number, ordered, now, self._now())
        self._drop_later(level, made, KEPT_S)
        return made

    def _drop_later(self, level: int, made: Snapshot, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._drop, level, made)

    def _drop(self, level: int, made: Snapshot) -> None:
        """Forget it, once it was not used for a while."""
        if self._kept.get(level) is not made:
            return
        left_s = made.used_at + KEPT_S - self._now()
        if left_s > 0:
            self._drop_later(level, made, left_s)
        else:
            del self._kept[level]
