"""The seam every eviction policy fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from kvstore.model.block import BlockKey


class Policy(Protocol):
    """Orders the blocks of one tier from the first to leave to the last.

    It may have `adopt_run(keys, parent)`, too: `adopt` of blocks that follow each other, in one."""

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Admit a block that was just written; `parent` is the block before it in its prefix."""

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Admit a block of an earlier life, as the newest of those but older than whatever was
        inserted or touched in this one."""

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        """Note that a request asked for this prefix, stored or not: what is not will be inserted
        soon, if at all. Unknown keys are not admitted by it. level: the binary logarithm of what a
        hit on a byte of it is worth, 0 for the usual. A policy may pay no attention to it, or not
        take it at all."""

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return, in their order, the blocks of a prefix that are here and, as far as is known,
        nobody else's but the session's that asked for it last."""

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Take the hint that these blocks' session is over. A policy may pay no attention to it."""

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        """Take the hint that these blocks will be asked for at `at`, on the policy's clock. A
        policy may take it as a use, or pay no attention to it."""

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        """Leave these blocks, consecutive ones of a prefix, out of every walk until `let_go` was
        called as often for the same ones. They may be removed meanwhile, and come back."""

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        """Undo one `hold` of exactly these blocks."""

    def is_leaf(self, key: BlockKey) -> bool:
        """Say whether a block is here without any child of it, and not held."""

    def save(self) -> bytes:
        """Return what another life should know: a few MiB at most, nothing if it need not."""

    def load(self, saved: bytes) -> None:
        """Take what `save` returned before anything is adopted; what cannot be read is ignored."""

    def remove(self, key: BlockKey) -> None:
        """Forget a block, if it is known. Its children may stay: somebody may hold them."""

    def victims(self) -> Iterator[BlockKey]:
        """Yield blocks from the first to leave on, none while a child of it is here.

        Between two steps blocks may be removed, nothing else; a block that was removed is not
        yielded. A block that is yielded and stays (somebody holds it) is passed over, and so are
        all before it in its prefix."""


PolicyFactory: TypeAlias = Callable[[Callable[[], float]], Policy]
"""Makes the empty policy of one tier; told the clock, in seconds from an arbitrary zero.

One that has a parameter `rows` is given the rows that the index has (`decide/rows.py`), to keep
columns of its own there; its policy has a method `retire`, which gives them back."""
