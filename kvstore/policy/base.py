"""The seam every eviction policy fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from kvstore.block import BlockKey


class Policy(Protocol):
    """Orders the blocks of one tier from the first to leave to the last."""

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Admit a block that was just written; `parent` is the block before it in its prefix."""

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Admit a block of an earlier life, as the newest of those but older than whatever was
        inserted or touched in this one."""

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asked for this prefix, stored or not: what is not will be inserted
        soon, if at all. Unknown keys are not admitted by it."""

    def end(self, prefix: Sequence[BlockKey]) -> None:
        """Note that the session whose last request asked for this prefix will not come back: what
        is its alone may leave first. Only a hint; other sessions may come for the same blocks."""

    def remove(self, key: BlockKey) -> None:
        """Forget a block, if it is known."""

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the first to leave on, none while a child of it is here.

        Between two steps blocks may be removed, nothing else; a block that was removed is not
        yielded. A block that is yielded and stays (somebody holds it) is passed over, and so are
        all before it in its prefix."""


PolicyFactory: TypeAlias = Callable[[Callable[[], float]], Policy]
"""Makes the empty policy of one tier; told the clock, in seconds from an arbitrary zero."""
