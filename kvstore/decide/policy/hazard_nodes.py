"""What `hz` keeps: uses, blocks, and the leaves of each class."""

from __future__ import annotations

from heapq import heapify
from typing import TypeAlias

from kvstore.decide.policy.prefix_tree import Node
from kvstore.model.block import BlockKey

LEAVES_MIN = 64  # of a ring, before what is stale in it is looked for

Entry: TypeAlias = "tuple[float, int, Block]"
"""The rank of a leaf, when it was linked, and the leaf: the lowest one leaves first."""


class Request:
    """A use. order: of two requests, the later one has the higher. session: the same object in all
    requests of a conversation. gap: its class. branches: how many requests went on from it. level:
    the binary logarithm of what a byte of its blocks is worth."""

    __slots__ = ("at", "branches", "gap", "level", "order", "session", "turn")

    def __init__(
        self, at: float, turn: int, gap: int, session: object, *, order: float, level: int = 0
    ) -> None:
        self.at = at
        self.turn = turn
        self.gap = gap
        self.session = session
        self.order = order
        self.level = level
        self.branches = 0


class Block(Node):
    """shared: used by two sessions. ended: its session is over. found: of an earlier life. ring:
    where it is linked as a leaf, None while it is not."""

    __slots__ = ("ended", "found", "gap", "request", "ring", "shared", "uses")

    request: Request  # this and all else is set when the block comes
    uses: int
    gap: int
    shared: bool
    ended: bool
    found: bool
    ring: Ring | None

    def __init__(self, key: BlockKey) -> None:
        super().__init__(key)
        self.ring = None


class Ring:
    """The leaves of one class and level, in a heap by their last use.

    Leaves that were used again, left, or got a child stay in the heap until they come up, or are
    most of it. score: of a leaf whose last use was `request`, as long as that is as good as new.
    """

    __slots__ = ("heap", "level", "number", "request", "room", "score")

    def __init__(self, number: int, level: int) -> None:
        self.number = number
        self.level = level
        self.heap: list[Entry] = []
        self.room = LEAVES_MIN
        self.request: Request | None = None
        self.score = 0.0

    def drop_stale(self, stays: list[Entry]) -> None:
        """Keep these entries alone; look again when there are twice as many."""
        self.heap[:] = stays
        heapify(self.heap)
        self.room = 2 * len(stays) + LEAVES_MIN


def are_alike(node: Block, other: Block) -> bool:
    """Say whether two blocks are of one class, and were last used by one request."""
    return (
        node.request is other.request
        and node.uses == other.uses
        and node.gap == other.gap
        and node.ended is other.ended
        and node.found is other.found
    )


def put_last(
    requests: dict[BlockKey, Request], key: BlockKey, request: Request, count_max: int
) -> None:
    requests.pop(key, None)
    requests[key] = request
    if len(requests) > count_max:
        del requests[next(iter(requests))]
