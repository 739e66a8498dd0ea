"""What the hosts of a replay know of each other's blocks: the view that ships, some seconds old.

Every daemon follows every other one: the first change after a silence is told at once, and what
changes then is told after a pause. Here all followers of a host hear from it at the same times, so
what they know is one table, of which a host leaves out itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.decide.heads import LEVELS_MAX, Change, Heads, heads_of
from kvstore.model.block import BlockKey
from kvstore.peer.choice import LOOKED_AT_MAX
from kvstore.peer.view import PENDING_MAX, Holder, View


@dataclass(slots=True)
class Staleness:
    """How old what was told was by then, over all answers: the oldest change in each."""

    answers: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def note(self, seconds: float) -> None:
        self.answers += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)

    @property
    def mean_s(self) -> float:
        return self.total_s / max(1, self.answers)


class Told:
    """heads: of each host. age_s: the pause between two answers of one. nbytes_max: of the view of
    a host; beyond it every second head is left out, then three of four."""

    def __init__(self, heads: Sequence[Heads], age_s: float, nbytes_max: int) -> None:
        self._hosts = heads
        self._age_s = age_s
        self._nbytes_max = nbytes_max
        self._view = View()
        self._numbers = [0] * len(heads)  # of the last change that was told
        self._told_at = [-math.inf] * len(heads)
        self._changed_at: dict[int, float] = {}  # by host: the oldest change that was not
        self._due: list[tuple[float, int]] = []
        self.level = 0
        self.staleness = Staleness()

    def note(self, host: int, at_s: float) -> None:
        """Note that a host answered a request."""
        if host in self._changed_at or self._hosts[host].number == self._numbers[host]:
            return
        self._changed_at[host] = at_s
        heapq.heappush(self._due, (max(at_s, self._told_at[host] + self._age_s), host))

    def tell(self, at_s: float) -> None:
        """Tell everybody what is due by then."""
        while self._due and self._due[0][0] <= at_s:
            due_s, host = heapq.heappop(self._due)
            self.staleness.note(due_s - self._changed_at.pop(host))
            self._told_at[host] = due_s
            self._take(host)

    def holders(
        self,
        keys: Sequence[BlockKey],
        block_tokens: int,
        *,
        hit: int = 0,
        besides: int | None = None,
    ) -> list[tuple[int, int]]:
        """Return the hosts that seem to have more of a prefix than `hit` blocks, the longest first,
        and how many heads of it each has. besides: not this one."""
        heads, step = heads_of(keys, block_tokens)
        most = LOOKED_AT_MAX + (besides is not None)
        found: list[Holder] = self._view.holders(heads, most, hit // step)
        others = [(each.place, each.heads) for each in found if each.place != besides]
        return others[:LOOKED_AT_MAX]

    def heads_known(self) -> int:
        """Return how many heads are in the view of the host that has fewest of them itself."""
        own = min(len(heads.at(self.level)) for heads in self._hosts)
        self._view.settle_at_once()
        return max(0, len(self._view) - own)

    def _take(self, host: int) -> None:
        heads = self._hosts[host]
        changes = heads.since(self._numbers[host], heads.number)
        if changes is None:
            self._snapshot(host)
        else:
            self._numbers[host] = heads.number
            self._change(host, [each for each in changes if each.level >= self.level])
        if self._view.pending > PENDING_MAX:
            self._view.settle_at_once()
        while self._over() and self.level < LEVELS_MAX:
            self.level += 1
            for each in range(len(self._hosts)):
                self._snapshot(each)

    def _over(self) -> bool:
        """Say whether the view of a host, which leaves out its own heads, is too large."""
        hosts = len(self._hosts)
        return self._view.nbytes * (hosts - 1) / hosts > self._nbytes_max

    def _change(self, host: int, changes: Sequence[Change]) -> None:
        heads = np.array([each.head for each in changes], dtype=np.uint64)
        self._view.change(host, heads, bytes(each.came for each in changes))

    def _snapshot(self, host: int) -> None:
        self._numbers[host] = self._hosts[host].number
        heads = np.array(self._hosts[host].at(self.level), dtype=np.uint64)
        self._view.replace_at_once(host, heads)
