"""What the index says of one tier: which blocks it has, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.decide.index import Index
from kvstore.model.block import BlockKey


class StoredIn:
    """The blocks of the arena, or (`framed`) of the file tier, with their parents; it wakes none.
    See `late_lru.Stored`."""

    def __init__(self, index: Index, *, framed: bool) -> None:
        self._index = index
        self._framed = framed

    @property
    def end(self) -> int:
        return self._index.rows.end

    def within(self, begin: int, end: int) -> Iterator[tuple[BlockKey, BlockKey | None]]:
        return self._index.walks.parents(range(begin, end), framed=self._framed)

    def among(self, keys: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, BlockKey | None]]:
        return self._index.walks.parents(self._index.rows.find_all(keys), framed=self._framed)
