"""What the arena alone has is offered to the file tier once more whenever it is used."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from kvstore.decide.index import Index, StoredBlock, StoredPart
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.steps import Steps
from kvstore.model.block import BlockKey


class Unwritten:
    """Keeps nothing of its own: the index knows what is not written."""

    def __init__(
        self,
        index: Index,
        dirty: DirtyRecords,
        admits: Callable[[StoredBlock, StoredPart], bool],
    ) -> None:
        self._index = index
        self._dirty = dirty
        self._admits = admits

    def used(self, prefix: Sequence[BlockKey]) -> None:
        """Queue the writes of what is here of a prefix that a request asked for, as far as they are
        admitted."""
        for key in prefix:
            block = self._index.by_key(key)
            if block is None:
                break
            if block.framed_parts < len(block.records) and not self._queue(block):
                break

    def queue_all(self, besides: Container[BlockKey] = ()) -> Steps[None]:
        """Queue the writes of all that the arena alone has, but for some blocks."""
        for keys in self._index.walks.unwritten():
            for key in keys:
                block = self._index.by_key(key)
                if block is not None and key not in besides:
                    self._queue(block)
            yield

    def _queue(self, block: StoredBlock) -> bool:
        """Return whether nothing of a block was refused."""
        admitted = True
        for part, record in self._dirty.unwritten(block):
            if self._admits(block, record):
                self._dirty.add(block, part, record)
            else:
                admitted = False
        return admitted
