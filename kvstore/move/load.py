"""A prefix that is being fetched from a source, and the windows it comes in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.decide.ask import Ask
from kvstore.decide.costs import usual_nbytes
from kvstore.model.block import Namespace, Part, padded
from kvstore.move.deletions import Watch
from kvstore.move.source import WINDOW_NBYTES, Listing, Source

WAITING_WINDOW_NBYTES = 2 << 20
"""Of blocks that are still being computed, so that little is left when the last block has come."""


@dataclass(slots=True)
class Load:
    """A prefix that is being fetched. hit: how long it was without the source; begun: before it,
    nothing is left to begin; watch: what of it is being deleted."""

    ask: Ask
    watch: Watch
    namespace: Namespace
    source: Source
    listing: Listing
    hit: int
    blocks_max: int  # to be fetched
    begun: int = 0
    nbytes: int = 0
    began: float = 0.0
    parts: dict[asyncio.Task[bool], int] = field(default_factory=dict)  # and bytes of each

    @property
    def goal_max(self) -> int:
        """How long the hit may become: nothing comes from a block on that is being deleted."""
        most = self.hit + self.blocks_max
        dead = self.watch.dead
        if not dead:
            return most
        keys = self.ask.keys
        return min(most, next((at for at, key in enumerate(keys) if key in dead), len(keys)))


def window_ends(load: Load, first: int, last: int) -> Iterator[int]:
    """Yield where the windows from block `first` on end, until one ends at `last` or beyond."""
    listing, each_nbytes = load.listing, block_nbytes(load.namespace, fine=load.ask.refined)
    while first < last:
        nbytes = WINDOW_NBYTES
        if listing.coming:
            nbytes = WAITING_WINDOW_NBYTES
        elif (first - load.hit) * each_nbytes < WINDOW_NBYTES:
            nbytes = listing.start_window_nbytes
        first += max(1, nbytes // each_nbytes)
        yield first


def block_nbytes(namespace: Namespace, *, fine: bool) -> int:
    """Return the bytes that most blocks take. fine: with their fine parts."""
    return sum(
        padded(usual_nbytes(namespace, Part(index, 0))) * group.shards
        for index, group in enumerate(namespace.groups)
        if fine or group.refines == -1
    )
