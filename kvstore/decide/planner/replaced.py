"""Durable records whose place a refined put has taken, until what took it is durable as well.

What was answered as durable has to be found after a crash. So the old frame stays where it is, and
counts again if the new record leaves the arena unwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from kvstore.decide.index import StoredBlock, StoredFrame, StoredPart


class Kept(NamedTuple):
    """Where the durable copy is, and what was known of it. Its frame is pinned."""

    block: StoredBlock
    frame: StoredFrame
    position: int
    nbytes: int
    checksum: int


class Replaced:
    """Durable copies, by the record that took their place."""

    def __init__(self, unpin_frame: Callable[[StoredFrame], None]) -> None:
        self._unpin_frame = unpin_frame
        self._kept: dict[StoredPart, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> Collection[Kept]:
        """All of them, to look at."""
        return self._kept.values()

    def of(self, record: StoredPart) -> Kept | None:
        """Return what a record took the place of, to look at."""
        return self._kept.get(record)

    def keep(self, block: StoredBlock, old: StoredPart) -> Kept | None:
        """Keep the durable copy of a record that is about to be dropped, or the one that it has
        itself taken the place of."""
        kept = self.take(old)
        if kept is not None or old.frame is None:
            return kept
        old.frame.pins += 1
        return Kept(block, old.frame, old.position, old.nbytes, old.checksum)

    def by(self, new: StoredPart, kept: Kept | None) -> None:
        """Note which record took its place."""
        if kept is not None:
            self._kept[new] = kept

    def take(self, new: StoredPart) -> Kept | None:
        """Return what a record took the place of; its pin is the caller's."""
        return self._kept.pop(new, None)

    def release(self, new: StoredPart) -> None:
        """Give up what a record took the place of: it is durable itself, or was deleted."""
        kept = self.take(new)
        if kept is not None:
            self._unpin_frame(kept.frame)

    def release_all(self) -> int:
        """Give up everything, because files need room; returns the bytes that come back at once."""
        nbytes = 0
        for record, (_, frame, *_) in list(self._kept.items()):
            if not frame.blocks and frame.pins == 1:
                nbytes += frame.extent.nbytes
            self.release(record)
        return nbytes
