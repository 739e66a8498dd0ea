"""What `hz` keeps: uses, blocks, and a ring of leaves for each class."""

from __future__ import annotations

from kvstore.decide.policy.prefix_tree import Node
from kvstore.model.block import BlockKey


class Request:
    """A use. session: the same object in all requests of a conversation. gap: its class.
    branches: how many requests went on from it."""

    __slots__ = ("at", "branches", "gap", "session", "turn")

    def __init__(self, at: float, turn: int, gap: int, session: object) -> None:
        self.at = at
        self.turn = turn
        self.gap = gap
        self.session = session
        self.branches = 0


class Block(Node):
    """shared: used by two sessions. ended: its session is over. found: of an earlier life."""

    __slots__ = ("ended", "found", "gap", "request", "shared", "uses")

    request: Request  # this and all else is set when the block comes
    uses: int
    gap: int
    shared: bool
    ended: bool
    found: bool


class Ring(Node):
    """The leaves of one class, `newer` the oldest of them. score: of a block whose last use was
    `request`, as long as that is so good as new."""

    __slots__ = ("number", "request", "score")

    def __init__(self, number: int) -> None:
        super().__init__(BlockKey(b""))
        self.number = number
        self.request: Request | None = None
        self.score = 0.0


def are_alike(node: Block, other: Block) -> bool:
    """Say whether two blocks are of one class, and were last used by one request."""
    return (
        node.request is other.request
        and node.uses == other.uses
        and node.gap == other.gap
        and node.ended is other.ended
        and node.found is other.found
    )


def next_leaf(node: Node) -> Node:
    """Return what comes after a node of a ring, the ring itself at its end.

    The node may have left while somebody walked there; it still points to newer ones.
    """
    node = node.newer
    while not node.here and node.key:
        node = node.newer
    return node


def put_last(
    requests: dict[BlockKey, Request], key: BlockKey, request: Request, count_max: int
) -> None:
    requests.pop(key, None)
    requests[key] = request
    if len(requests) > count_max:
        del requests[next(iter(requests))]
