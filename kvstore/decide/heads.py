"""Heads: every so many tokens, one block of a prefix stands for all before it.

A host tells its peers the heads it has, so that they know without asking who may have a prefix. A
block is a head if its place in its prefix is a multiple of 256 tokens, and it is told of while all
groups without a window are complete, in whatever tier. The end of a prefix leaves first, so the
last head that a host has is how long its hit is, to 256 tokens. 8 bytes of its key name it: keys
are hashes. What is told is a hint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvstore.model.block import BlockKey, Namespace

if TYPE_CHECKING:
    from kvstore.decide.index import StoredBlock

HEAD_TOKENS = 256
CHANGES_KEPT = 1 << 16
LEVELS_MAX = 31
from_bytes = int.from_bytes


class Change(NamedTuple):
    """A head that came, or left."""

    head: int
    came: bool
    level: int


def head_step(block_tokens: int) -> int:
    """Return how many blocks there are from one head to the next: a power of two."""
    step = 1
    while step * block_tokens < HEAD_TOKENS:
        step *= 2
    return step


def head_of(key: BlockKey) -> int:
    """Return the number that names a head."""
    return from_bytes(key[:8], "little")


def heads_of(keys: Sequence[BlockKey], block_tokens: int) -> tuple[list[int], int]:
    """Return the heads of a prefix, in its order, and how many blocks there are between them."""
    step = head_step(block_tokens)
    return [head_of(key) for key in keys[step - 1 :: step]], step


class Heads:
    """The heads of one host. number: of the last change. on_change: told of each."""

    def __init__(self) -> None:
        self._levels: dict[int, int] = {}  # head -> the highest level at which it is told
        self._changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self.on_change: Callable[[], None] = lambda: None
        self.number = 0

    def __len__(self) -> int:
        return len(self._levels)

    def look(self, block: StoredBlock, namespace: Namespace | None) -> None:
        """Note what became of a block."""
        if namespace is None:
            return
        place, rest = divmod(block.block_index + 1, head_step(namespace.block_tokens))
        if rest:
            return
        needed = sum(1 << i for i, g in enumerate(namespace.groups) if not g.window_tokens)
        head = head_of(block.key)
        if not block.complete or block.complete & needed != needed:
            self._left(head)
        elif head not in self._levels:
            level = min((place & -place).bit_length() - 1, LEVELS_MAX)
            self._levels[head] = level
            self._note(Change(head, True, level))

    def left(self, key: BlockKey) -> None:
        """Note that a block is not stored any more."""
        self._left(head_of(key))

    def _left(self, head: int) -> None:
        level = self._levels.pop(head, None)
        if level is not None:
            self._note(Change(head, False, level))

    def _note(self, change: Change) -> None:
        self._changes.append(change)
        self.number += 1
        self.on_change()

    def at(self, level: int) -> list[int]:
        """Return the heads of a level and higher ones, in no order."""
        if not level:
            return list(self._levels)
        return [head for head, most in self._levels.items() if most >= level]

    def since(self, number: int, most: int) -> list[Change] | None:
        """Return at most so many changes after one; None: they are not kept any more."""
        count = self.number - number
        if not 0 <= count <= len(self._changes):
            return None
        first = len(self._changes) - count
        return list(islice(self._changes, first, first + most))
