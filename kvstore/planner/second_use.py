"""Write what is used a second time, instead of everything at once.

It spares flash: of chats, three blocks in four are used once. What was used once is in the arena
alone, so a crash loses it, and eviction: then a few bytes of it stay (`ghosts.py`), by which it is
known when it is computed again, and is written at once. A parent is used at least as often as its
child, so what is written are prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.block import BlockKey
from kvstore.index import Index, StoredBlock, StoredPart
from kvstore.planner.dirty import DirtyRecords
from kvstore.policy.ghosts import Ghosts

GHOSTS_PER_BLOCK = 2


class SecondUse:
    """Knows which blocks were used before. Bounded by the blocks in the index."""

    def __init__(
        self,
        index: Index,
        dirty: DirtyRecords,
        admits: Callable[[StoredBlock, StoredPart], bool],
    ) -> None:
        self._index = index
        self._dirty = dirty
        self._admits = admits
        self._ghosts = Ghosts()

    def is_second(self, block: StoredBlock) -> bool:
        """Say whether to write a record of a block that was just put; notes its first use."""
        if any(record.frame is not None or record.dirty for record in block.records):
            return True
        if len(block.records) > 1:  # another rank's part of the same use
            return False
        if self._ghosts.find(block.key) is not None:
            return True
        self._ghosts.put(block.key, 1, 0.0, blocks=GHOSTS_PER_BLOCK * len(self._index))
        return False

    def used(self, prefix: Sequence[BlockKey]) -> None:
        """Queue the writes of what is here of a prefix that a request asked for."""
        for key in prefix:
            block = self._index.by_key(key)
            if block is None:
                break
            if block.framed_parts < len(block.records):
                self._queue(block)

    def queue_all(self) -> None:
        """Queue the writes of all that the arena alone has."""
        for block in self._index:
            self._queue(block)

    def _queue(self, block: StoredBlock) -> None:
        for part, record in self._dirty.unwritten(block):
            if self._admits(block, record):
                self._dirty.add(block, part, record)
