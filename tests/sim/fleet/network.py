"""Who reaches whom, and what becomes of a message.

A real connection sends again what is lost. Here it never comes, and its call runs into a deadline;
only streams, and calls that wait long for news, are sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.fleet.link import SimLink
    from tests.sim.fleet.serving import SimServer

TRAVEL_S = 0.001
LATE_S = 0.7
ORDER_LATE_S = 2.5
STALL_S = 0.1  # after which what did not arrive is sent again


@dataclass(slots=True)
class Weather:
    """Chances: that a message is lost, doubled, or late; that a read is cut, at each piece; that a
    bit of a piece, or of a hint, is flipped. late_orders: that a delete is late, which others
    overtake."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    cut: float = 0.0
    flipped: float = 0.0
    late_orders: float = 0.0

    @classmethod
    def drawn(cls, draw: Random) -> Weather:
        """Return good weather now and then, else bad in some ways."""
        if draw.random() < 0.25:
            return cls()
        return cls(
            lost=draw.choice([0.0, 0.01, 0.03]),
            doubled=draw.choice([0.0, 0.02]),
            late=draw.choice([0.0, 0.01, 0.1]),
            cut=draw.choice([0.0, 0.0, 0.01]),
            flipped=draw.choice([0.0, 0.0, 0.005]),
            late_orders=draw.choice([0.0, 0.3]),
        )


class Network:
    """servers: by address. links: those that are open. passed: how many messages arrived."""

    def __init__(self, draw: Random, note: Callable[[BaseException], None]) -> None:
        self.weather = Weather()
        self.servers: dict[str, SimServer] = {}
        self.links: set[SimLink] = set()
        self.draw = draw
        self.note = note
        self.passed = self.cuts = self.flips = 0
        self._blocked: set[tuple[str, str]] = set()

    def block(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Let nothing pass from sources to targets. Hosts are known by their node ids."""
        self._blocked |= {(a, b) for a in sources for b in targets if a != b}

    def calm(self) -> None:
        """End every fault and every partition."""
        self.weather = Weather()
        self.heal()

    def heal(self) -> None:
        self._blocked.clear()

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self._blocked

    async def travel(self, source: str, target: str, *, piece: bool = False) -> bool:
        """Take as long as a message does; return whether it arrived. piece: of a stream, which
        waits for a way instead of getting lost."""
        late = self.draw.random() < self.weather.late
        await asyncio.sleep(self.draw.expovariate(1 / (LATE_S if late else TRAVEL_S)))
        lost = not piece and self.draw.random() < self.weather.lost
        arrived = not lost and self.passes(source, target)
        self.passed += arrived
        return arrived

    async def get_through(self, source: str, target: str) -> None:
        """Take as long as it takes until a message arrives: it is sent again."""
        while not await self.travel(source, target, piece=True):  # noqa: ASYNC110 - as a sender does
            await asyncio.sleep(STALL_S)

    async def hold_up(self) -> None:
        """Let a delete be late, now and then: nearly too late."""
        if self.draw.random() < self.weather.late_orders:
            await asyncio.sleep(self.draw.uniform(0.0, ORDER_LATE_S))

    def copies(self) -> int:
        """Return how many times one message arrives, if it does."""
        return 1 + (self.draw.random() < self.weather.doubled)

    def flip(self, data: bytes) -> bytes:
        """Return data as it arrives: now and then with a flipped bit."""
        if not data or self.draw.random() >= self.weather.flipped:
            return data
        self.flips += 1
        changed = bytearray(data)
        changed[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(changed)

    def is_cut(self) -> bool:
        """Say whether a read ends at this piece."""
        cut = self.draw.random() < self.weather.cut
        self.cuts += cut
        return cut
