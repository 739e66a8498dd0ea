"""What no cache can beat: the infinite one, and the offline optimum of a size.

The optimum is Belady's: who is used again last leaves first, and of those used again at the same
time the deeper block does. A parent is never used again later than its child, so under the prefix
rule what is kept is always a prefix of something, and no other choice gives more hits.

Blocks that one request used last, and that are used again by one and the same request, leave one
after the other from the deepest up and become worthless together. So the queue holds such
*stretches* of a prompt instead of blocks, and one walk over the requests is enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.replay.workload import Workload

_NEVER = np.iinfo(np.int64).max


class Bounds:
    """Looks into the future of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._optima: dict[int, float] = {}
        lengths = [len(request.blocks) for request in workload.requests]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._blocks = np.empty(int(self._starts[-1]), np.int64)
        for start, request in zip(self._starts, workload.requests, strict=False):
            self._blocks[start : start + len(request.blocks)] = request.blocks
        users = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        order = np.argsort(self._blocks, kind="stable")  # by block, then by time
        same = np.flatnonzero(self._blocks[order][1:] == self._blocks[order][:-1])
        self._next = np.full(len(self._blocks), _NEVER)  # who uses it next, by use
        self._next[order[same]] = users[order[same + 1]]
        self._first = np.ones(len(self._blocks), dtype=bool)
        self._first[order[same + 1]] = False

    def infinite(self) -> float:
        """Return the token hit ratio of a cache that forgets nothing."""
        first = self._first[self._starts[self._workload.warmup] :]
        hits = int(len(first) - first.sum())
        return self._ratio(hits)

    def optimum(self, blocks_max: int) -> float:
        """Return the token hit ratio of the best choice of `blocks_max` blocks at any time."""
        if blocks_max not in self._optima:
            self._optima[blocks_max] = self._optimum(blocks_max)
        return self._optima[blocks_max]

    def _optimum(self, blocks_max: int) -> float:
        here = np.zeros(len(self._workload.keys), dtype=bool)
        stretches: list[tuple[int, int, int, int]] = []  # -who is next, -end, begin, prompt's start
        count = hits = 0
        counted = self._starts[self._workload.warmup]
        for start, end in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            blocks = self._blocks[start:end]
            hit = _leading(here, blocks)
            hits += hit if start >= counted else 0
            here[blocks[hit:]] = True
            count += len(blocks) - hit
            for begin, stop, user in _stretches(self._next[start:end]):
                heapq.heappush(stretches, (-user, -stop, begin, start))
            while count > blocks_max:
                user, minus_stop, begin, origin = heapq.heappop(stretches)
                keep = max(begin, -minus_stop - (count - blocks_max))
                here[self._blocks[origin + keep : origin - minus_stop]] = False
                count -= -minus_stop - keep
                if keep > begin:
                    heapq.heappush(stretches, (user, -keep, begin, origin))
        return self._ratio(hits)

    def room_guess(self, hits: float) -> int:
        """Return about how many blocks LRU needs for this share of the infinite cache's hits.

        A use is a hit if the block's last one was at most so many uses ago. As many uses touch, on
        average, as many blocks as the sum says over each use's time until the next, cut there.
        """
        uses = np.arange(len(self._blocks))
        order = np.argsort(self._blocks, kind="stable")
        again = np.full(len(self._blocks), len(self._blocks), np.int64)
        same = np.flatnonzero(self._blocks[order][1:] == self._blocks[order][:-1])
        again[order[same]] = uses[order[same + 1]] - uses[order[same]]
        distances = again[again < len(again)]
        if not len(distances):
            return 0
        window = np.quantile(distances, min(1.0, hits))
        return int(np.minimum(again, window).mean())

    def _ratio(self, hit_blocks: int) -> float:
        return hit_blocks * self._workload.block_tokens / max(1, self._workload.tokens)


def _leading(here: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any]) -> int:
    """Return how many blocks are here from the first on; what is here is always a prefix."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if here[blocks[middle]]:
            low = middle + 1
        else:
            high = middle
    return low


def _stretches(users: np.ndarray[Any, Any]) -> Sequence[tuple[int, int, int]]:
    """Return (begin, end, who) of each run of equal next users."""
    if not len(users):
        return ()
    cuts = np.flatnonzero(users[1:] != users[:-1]) + 1
    begins = [0, *cuts.tolist()]
    return list(zip(begins, [*begins[1:], len(users)], users[begins].tolist(), strict=True))
