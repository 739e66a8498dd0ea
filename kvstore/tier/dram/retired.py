"""Memfds of extents that were given back, watched for a while.

A client is told to unmap them. One that keeps its mapping can touch the pages again, which makes
them anew. The kernel charges them to that client, and nobody else can see them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.tier.dram.extent_memory import present_nbytes

WATCHED_MAX = 64  # descriptors of one arena
QUIET_LOOKS = 240  # so often nothing is there, then it is let go


@dataclass(slots=True, eq=False)
class RetiredExtent:
    """One memfd. lock: as an extent's. touched: somebody has touched it since it was retired.
    quiet_looks: so often there was nothing, one after another. left_nbytes: the last punch left so
    much there. closed: it is watched no more, and `fd` may name another file."""

    id: int
    fd: int
    nbytes: int
    lock: threading.Lock
    left_nbytes: int = 0
    touched: bool = False
    quiet_looks: int = 0
    closed: bool = False


class RetiredExtents:
    """Iterate over it for all that are watched."""

    def __init__(self) -> None:
        self._watched: list[RetiredExtent] = []

    def __iter__(self) -> Iterator[RetiredExtent]:
        return iter(list(self._watched))

    def add(self, extent: RetiredExtent) -> None:
        """Watch a memfd, which is owned from now on. Beyond the bound, the quietest is let go."""
        self._watched.append(extent)
        if len(self._watched) > WATCHED_MAX:
            self._let_go(max(self._watched, key=lambda each: each.quiet_looks))

    def back(self) -> list[tuple[RetiredExtent, int]]:
        """Look at all: return which have pages, and how many bytes. Those that have had none for
        long are let go."""
        found = []
        for each in self:
            if nbytes := present_nbytes(each.fd):
                each.quiet_looks = 0
                found.append((each, nbytes))
                continue
            each.quiet_looks += 1
            if each.quiet_looks >= QUIET_LOOKS:
                self._let_go(each)
        return found

    def close(self) -> None:
        for each in self:
            self._let_go(each)

    def _let_go(self, extent: RetiredExtent) -> None:
        self._watched.remove(extent)
        extent.closed = True
        os.close(extent.fd)
