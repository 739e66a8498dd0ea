"""LRU in which the tail of a prefix leaves before its head.

A prefix is only worth the blocks that are left from its start, so evicting the head of a
conversation would waste everything behind it. All blocks used together are made recent from the
tail to the head: the head ends up the most recent of them. A block written later (decoded after its
parent was last used) is placed just before its parent, in the order of leaving, so a child never
outlives it. This is leaf-LRU, what vLLM and SGLang do on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.decide.policy.prefix_tree import LinkedNode, PrefixTree, link, unlink
from kvstore.model.block import BlockKey

PASSED_MAX = 4096
"""Blocks with children that one walk passes over: they are behind tails that somebody holds."""


class TailFirstLru:
    """A doubly linked ring from the oldest block to the newest; every operation is O(1) a block."""

    def __init__(self) -> None:
        self._tree = PrefixTree(LinkedNode)
        self._ring = LinkedNode(
            BlockKey(b"")
        )  # sentinel: newer = the oldest block, older = the newest
        self._found = LinkedNode(BlockKey(b""))  # everything above it was inserted or touched since
        link(self._found, self._ring)
        self._held: dict[BlockKey, int] = {}  # how often; they are linked to themselves alone

    def __len__(self) -> int:
        return self._tree.blocks

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._insert(key, parent, self._ring)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._insert(key, parent, self._found)

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        nodes, newest = self._tree.nodes, self._ring
        for key in reversed(prefix):
            node = nodes.get(key)
            if node is not None and node.here and node.newer is not node:
                unlink(node)
                link(node, newest)

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the tail that no other prefix shares."""
        tail: list[LinkedNode] = []
        for key in reversed(prefix):
            node = self._tree.find(key)
            if node is not None:
                if node.children > (1 if tail else 0):
                    break
                tail.append(node)
        return [node.key for node in reversed(tail)]

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing: LRU goes by use alone."""

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        """Take it as a use: LRU knows no better."""
        self.touch(keys)

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        for key in prefix:
            count = self._held.get(key, 0)
            self._held[key] = count + 1
            node = self._tree.find(key)
            if node is not None and not count:
                unlink(node)
                node.older = node.newer = node

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        for key in reversed(prefix):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                node = self._tree.find(key)
                if node is not None:
                    link(node, self._ring)

    def is_leaf(self, key: BlockKey) -> bool:
        node = self._tree.find(key)
        return node is not None and not node.children and key not in self._held

    def save(self) -> bytes:
        """Return nothing: what was written in which order is known from the frames."""
        return b""

    def load(self, saved: bytes) -> None:
        """Do nothing."""

    def remove(self, key: BlockKey) -> None:
        left = self._tree.leave(key)
        if left is not None:
            unlink(left[0])

    def victims(self) -> Iterator[BlockKey]:
        node, passed = self._ring.newer, set[LinkedNode]()
        while node is not self._ring and len(passed) < PASSED_MAX:
            if node.here and node.children:
                passed.add(node)
            leaf: LinkedNode | None = node
            while leaf is not None and leaf.here and not leaf.children:
                above = leaf.parent
                yield leaf.key
                # A parent that came after its children may be older than they are.
                leaf = above if not leaf.here and above in passed else None
            # What was removed meanwhile still points on to newer blocks: follow it into the ring.
            node = node.newer

    def _insert(self, key: BlockKey, parent: BlockKey | None, newest: LinkedNode) -> None:
        node = self._tree.enter(key, parent)
        if node is None:
            return
        if key in self._held:
            node.older = node.newer = node
            return
        above = node.parent
        beside = above is not None and above.here and above.newer is not above
        link(node, above if beside else newest)
