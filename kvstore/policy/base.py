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

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the blocks of a prefix that are here and, as far as is known, nobody else's but
        the session's that asked for it last."""

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Take the hint that these blocks' session is over. A policy may pay no attention to it."""

    def remove(self, key: BlockKey) -> None:
        """Forget a block, if it is known."""

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the first to leave on, none while a child of it is here.

        Between two steps blocks may be removed, nothing else; a block that was removed is not
        yielded. A block that is yielded and stays (somebody holds it) is passed over, and so are
        all before it in its prefix."""


PolicyFactory: TypeAlias = Callable[[Callable[[], float]], Policy]
"""Makes the empty policy of one tier; told the clock, in seconds from an arbitrary zero."""
