"""What `hz` keeps: uses, blocks in columns, and the leaves of each class."""

from __future__ import annotations

from typing import Any, TypeAlias

from kvstore.decide.policy.prefix_tree import PrefixTree
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey

LEAVES_MIN = 64  # of a ring, before what is stale in it is looked for
GAP = 3  # bits of `Blocks.marks`: the class of the time between a block's last two uses
SHARED = 4  # used by two sessions
ENDED = 8  # its session is over
FOUND = 16  # of an earlier life

Entry: TypeAlias = tuple[float, int, int]
"""The rank of a leaf, when it was linked, and its row: the lowest one leaves first."""


class Request:
    """A use. order: of two requests, the later one has the higher. session: the same object in all
    requests of a conversation. gap: its class. branches: how many requests went on from it. level:
    the binary logarithm of what a byte of its blocks is worth. number, blocks: see `Requests`."""

    __slots__ = (
        "at",
        "blocks",
        "branches",
        "gap",
        "level",
        "number",
        "order",
        "session",
        "turn",
    )

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
        self.number = self.blocks = 0


class Requests:
    """Requests by number, as long as one is the last use of some blocks, in a tier or a shadow."""

    def __init__(self) -> None:
        self.all: list[Any] = [None]
        self._free: list[int] = []

    def count(self, request: Request, blocks: int) -> int:
        """Note that so many more blocks were used last by a request; returns its number."""
        if not request.blocks:
            if not self._free:
                self._free.append(len(self.all))
                self.all.append(None)
            request.number = self._free.pop()
            self.all[request.number] = request
        request.blocks += blocks
        return request.number

    def uncount(self, number: int, blocks: int) -> None:
        """Undo `count` for so many blocks."""
        request = self.all[number]
        request.blocks -= blocks
        if not request.blocks:
            self.all[number] = None
            self._free.append(number)


class Blocks(PrefixTree):
    """The blocks of one tier, and of each the request that used it last, how often it was used, and
    `marks`: see the constants.

    ring_of: the number of the ring where it is linked as a leaf, 0 while it is not. requests: by
    number. ticks: how many leaves were linked, ever. gone: how many when a row was last given back:
    older entries for it are of another block.
    """

    def __init__(self, requests: Requests, rows: Rows | None = None) -> None:
        super().__init__(rows)
        self.request_of = self.column("I")
        self.uses = self.column("I")
        self.marks = self.flags()
        self.ring_of = self.column("H")
        self.gone = self.column("Q")
        self.ticks = 0
        self.requests = requests.all
        self.count, self.uncount = requests.count, requests.uncount

    def request(self, row: int) -> Request:
        """Return what used a block last."""
        request: Request = self.requests[self.request_of[row]]
        return request

    def give(self, row: int, request: Request) -> None:
        """Note the last use of a block."""
        number = self.count(request, 1)
        before = self.request_of[row]
        self.request_of[row] = number
        if before:
            self.uncount(before, 1)

    def drop(self, row: int) -> None:
        super().drop(row)
        self.gone[row] = self.ticks

    def ungive(self, row: int) -> None:
        """Forget the last use of a block that is not here any more."""
        number = self.request_of[row]
        if number:
            self.request_of[row] = 0
            self.uncount(number, 1)

    def are_alike(self, row: int, other: int) -> bool:
        """Say whether two blocks are of one class, and were last used by one request."""
        return (
            self.request_of[row] == self.request_of[other]
            and self.uses[row] == self.uses[other]
            and not (self.marks[row] ^ self.marks[other]) & ~SHARED
        )


class Ring:
    """The leaves of one class and level, in a heap by their last use.

    Leaves that were used again, left, or got a child stay in the heap until they come up, or are
    most of it. Then it becomes the old heap, and what is good in it goes over to a new one, a few
    entries whenever a leaf comes: one of millions would take a tenth of a second at once. score: of
    a leaf whose last use was `request`, as long as that is as good as new. place: its number among
    the rings of a tier, from 1. room: entries, until what is stale is looked for.
    """

    __slots__ = ("heap", "level", "number", "old", "place", "request", "room", "score")

    def __init__(self, number: int, level: int, place: int) -> None:
        self.number = number
        self.level = level
        self.place = place
        self.heap: list[Entry] = []
        self.old: list[Entry] = []
        self.room = LEAVES_MIN
        self.request: Request | None = None
        self.score = 0.0


def put_last(
    requests: dict[BlockKey, Request], key: BlockKey, request: Request, count_max: int
) -> None:
    requests.pop(key, None)
    requests[key] = request
    if len(requests) > count_max:
        del requests[next(iter(requests))]
