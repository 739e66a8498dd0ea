"""LRU in which the tail of a prefix leaves before its head.

A prefix is only worth the blocks that are left from its start, so evicting the head of a
conversation would waste everything behind it. All blocks used together are made recent from the
tail to the head: the head ends up the most recent of them. A block written later (decoded after its
parent was last used) is placed just before its parent, in the order of leaving, so a child never
outlives it. This is leaf-LRU, what vLLM and SGLang do on the device, without keeping a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.block import BlockKey


class _Node:
    __slots__ = ("key", "newer", "older")

    def __init__(self, key: BlockKey) -> None:
        self.key = key
        self.older: _Node = self
        self.newer: _Node = self


class TailFirstLru:
    """A doubly linked ring from the oldest block to the newest; every operation is O(1) a block."""

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._ring = _Node(BlockKey(b""))  # sentinel: newer = the oldest block, older = the newest
        self._found = _Node(BlockKey(b""))  # everything above it was inserted or touched since
        self._link(self._found, self._ring)

    def __len__(self) -> int:
        return len(self._nodes)

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._insert(key, parent, self._ring)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._insert(key, parent, self._found)

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        nodes = self._nodes
        for key in reversed(prefix):
            node = nodes.get(key)
            if node is not None:
                self._unlink(node)
                self._link(node, self._ring)

    def remove(self, key: BlockKey) -> None:
        node = self._nodes.pop(key, None)
        if node is not None:
            self._unlink(node)

    def victims(self) -> Iterator[BlockKey]:
        node = self._ring.newer
        while node is not self._ring:
            # What was removed meanwhile still points on to newer blocks: follow it into the ring.
            if self._nodes.get(node.key) is node:
                yield node.key
            node = node.newer

    def _insert(self, key: BlockKey, parent: BlockKey | None, newest: _Node) -> None:
        if key in self._nodes:
            return
        above = self._nodes.get(parent) if parent is not None else None
        node = self._nodes[key] = _Node(key)
        self._link(node, above if above is not None else newest)

    @staticmethod
    def _link(node: _Node, above: _Node) -> None:
        """Put `node` on the older side of `above`."""
        node.newer, node.older = above, above.older
        above.older.newer = node
        above.older = node

    @staticmethod
    def _unlink(node: _Node) -> None:
        node.older.newer, node.newer.older = node.newer, node.older
