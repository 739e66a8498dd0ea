"""Write what is used a second time, instead of everything at once.

It spares flash: of chats, three blocks in four are used once. What was used once is in the arena
alone, so a crash loses it, and eviction: then a few bytes of it stay (`ghosts.py`), by which it is
known when it is computed again, and is written at once. A parent is used at least as often as its
child, so what is written are prefixes.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.decide.index import Index, StoredBlock, StoredPart
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.unwritten import Unwritten
from kvstore.decide.policy.ghosts import Ghosts

GHOSTS_PER_BLOCK = 2


class SecondUse(Unwritten):
    """Knows which blocks were used before. Bounded by the blocks in the index."""

    def __init__(
        self,
        index: Index,
        dirty: DirtyRecords,
        admits: Callable[[StoredBlock, StoredPart], bool],
    ) -> None:
        super().__init__(index, dirty, admits)
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
