"""Which block comes before which, so that a parent never leaves before its children.

A node lives while its block is here, or while a child of it is: a block that comes back after its
children (reads of another prefix may bring those up first) finds them again. Keys are hashes of
what comes before them, so honest prefixes form no cycle; blocks of one that was made up would hold
each other for ever, and therefore have no parent here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvstore.model.block import BlockKey


class Node:
    """A block."""

    __slots__ = ("children", "here", "key", "parent")

    def __init__(self, key: BlockKey) -> None:
        self.key = key
        self.here = False
        self.children = 0
        self.parent: Any = None  # a node of the same class


class LinkedNode(Node):
    """A block that a policy keeps in a ring, linked to itself when it is in none."""

    __slots__ = ("newer", "older")

    def __init__(self, key: BlockKey) -> None:
        super().__init__(key)
        self.older: LinkedNode = self
        self.newer: LinkedNode = self


N = TypeVar("N", bound=Node)


class PrefixTree(Generic[N]):
    """The blocks of one tier. Every operation is O(1), but for a block that comes back after its
    children: O(depth)."""

    def __init__(self, make: Callable[[BlockKey], N]) -> None:
        self.nodes: dict[BlockKey, N] = {}
        self.blocks = 0
        self._make = make

    def find(self, key: BlockKey) -> N | None:
        """Return the node of a block that is here."""
        node = self.nodes.get(key)
        return node if node is not None and node.here else None

    def enter(self, key: BlockKey, parent: BlockKey | None) -> N | None:
        """Add a block and return its node; None: it is here already."""
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = self._make(key)
        elif node.here:
            return None
        node.here = True
        self.blocks += 1
        if parent is not None and parent != key:
            above = self.nodes.get(parent)
            if above is None:
                above = self.nodes[parent] = self._make(parent)
            if not node.children or not _descends(above, node):
                node.parent = above
                above.children += 1
        return node

    def leave(self, key: BlockKey) -> tuple[N, N | None] | None:
        """Remove a block; return its node and its parent's. None: it was not here."""
        node = self.find(key)
        if node is None:
            return None
        node.here = False
        self.blocks -= 1
        if not node.children:
            del self.nodes[key]
        above, node.parent = node.parent, None
        if above is not None:
            above.children -= 1
            if not above.children and not above.here:
                del self.nodes[above.key]
        return node, above

    def hold(self, key: BlockKey) -> N:
        """Give a block a child that is not there, until `let_go`: it is no leaf meanwhile, whether
        it is here or not. Returns its node."""
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = self._make(key)
        node.children += 1
        return node

    def let_go(self, key: BlockKey) -> N:
        """Undo one `hold`; returns the node."""
        node = self.nodes[key]
        node.children -= 1
        if not node.children and not node.here:
            del self.nodes[key]
        return node


def _descends(node: Node, ancestor: Node) -> bool:
    """Say whether `ancestor` is `node` or comes before it."""
    while node is not None:
        if node is ancestor:
            return True
        node = node.parent
    return False


def link(node: LinkedNode, above: LinkedNode) -> None:
    """Put `node` on the older side of `above`, which is in a ring."""
    node.newer, node.older = above, above.older
    above.older.newer = node
    above.older = node


def unlink(node: LinkedNode) -> None:
    """Take `node` out of its ring; its own links stay, for whoever is walking there."""
    node.older.newer, node.newer.older = node.newer, node.older
