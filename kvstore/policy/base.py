"""The seam every eviction policy fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.block import BlockKey


class Policy(Protocol):
    """Orders the blocks of one tier from the first to leave to the last."""

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Admit a block that was just written; `parent` is the block before it in its prefix."""

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Admit a block of an earlier life, as the newest of those but older than whatever was
        inserted or touched in this one."""

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        """Note that these consecutive blocks of a prefix were used. Unknown keys are ignored."""

    def remove(self, key: BlockKey) -> None:
        """Forget a block, if it is known."""

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the first to leave on. Between two steps blocks may be removed, nothing
        else; a block that was removed is not yielded."""
