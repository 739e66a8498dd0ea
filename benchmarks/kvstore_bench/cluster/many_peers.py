"""Peers that have heads and nothing else, in a process of their own: `python -m` this module.

Arguments: how many peers, heads of each, the fleet. It prints their ports as JSON, then reads
lines: a number is how many heads of each peer change from then on, in a second. It ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

import numpy as np

from kvstore.model.block import BlockKey, Namespace, NamespaceId, Span
from kvstore.model.member import Member, NodeId
from kvstore.peer.base import (
    CHANGES_MAX,
    HEADS_MAX,
    HeadsAsk,
    HeadsReply,
    Loan,
    PeerBusy,
    PeerMatch,
)
from kvstore.peer.identity import Ourselves
from kvstore.peer.lenders import Lenders
from kvstore.peer.server import PeerServer

KEPT = 1 << 16  # changes
TICK_S = 0.1


class Teller:
    """One peer. Implements `Lender`; what it is asked beside heads it has not."""

    def __init__(self, number: int, count: int) -> None:
        self.instance = f"{number:016x}"
        self._drawn = np.random.default_rng(number)
        self._heads = np.sort(self._draw(count))
        self._changes = np.empty(0, "<u8")
        self._came = b""
        self._first = 0  # number of the first change that is kept
        self._news = asyncio.Event()

    def engines_busy(self) -> bool:
        return False

    def _draw(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self._drawn.integers(0, 1 << 63, count, dtype=np.uint64)

    def change(self, count: int) -> None:
        """Let so many heads change: each second one comes, the others leave."""
        new = self._draw(count)
        new[1::2] = self._drawn.choice(self._heads, len(new[1::2]), replace=False)
        self._changes = np.concatenate([self._changes, new])[-KEPT:].astype("<u8")
        self._came = (self._came + bytes((at + 1) % 2 for at in range(count)))[-KEPT:]
        self._first += max(0, count - max(0, KEPT - len(self._changes)))
        self._news.set()

    @property
    def _number(self) -> int:
        return self._first + len(self._changes)

    async def heads(self, ask: HeadsAsk) -> HeadsReply:
        if ask.instance == self.instance and ask.since >= self._first:
            if ask.since == self._number:
                self._news.clear()
                try:
                    async with asyncio.timeout(ask.wait_s):
                        await self._news.wait()
                except TimeoutError:
                    pass
            begin = ask.since - self._first
            end = begin + CHANGES_MAX
            told, came = self._changes[begin:end], self._came[begin:end]
            since = ask.since + len(told)
            return HeadsReply(self.instance, ask.level, since, False, 0, told.tobytes(), came)
        begin = int(np.searchsorted(self._heads, np.uint64(ask.cursor)))
        end = begin + HEADS_MAX
        cursor = int(self._heads[end]) if end < len(self._heads) else 0
        chunk = self._heads[begin:end].astype("<u8").tobytes()
        return HeadsReply(self.instance, ask.level, self._number, True, cursor, chunk)

    def register(self, namespace: Namespace) -> None: ...

    async def match(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], skip_blocks: int, refined: bool
    ) -> PeerMatch:
        return PeerMatch(0, 0)

    async def arrival(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> None: ...

    async def lend(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        refined: bool,
        borrower: NodeId,
    ) -> Loan:
        raise PeerBusy("it has heads alone")

    async def corrupt(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None: ...

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None: ...


async def serve(peers: int, heads: int, fleet: str) -> None:
    """Serve peers until stdin ends."""
    tellers = [Teller(number, heads) for number in range(1, peers + 1)]
    servers = [PeerServer(_ourselves(teller, fleet), Lenders.only(teller)) for teller in tellers]
    for server in servers:
        await server.start("127.0.0.1", 0)
    print(json.dumps([server.port for server in servers]), flush=True)
    per_s = 0
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    owed = 0.0
    while True:
        done, _ = await asyncio.wait([reading], timeout=TICK_S)
        if done:
            line = reading.result()
            if not line:
                break
            per_s = int(line)
            reading = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        owed += TICK_S * per_s
        count = int(owed)
        owed -= count
        for teller in tellers if count else ():
            teller.change(count)
    await asyncio.gather(*(server.close() for server in servers))


def _ourselves(teller: Teller, fleet: str) -> Ourselves:
    member = Member(NodeId(teller.instance * 2), teller.instance, "127.0.0.1:1")
    return Ourselves(fleet, lambda: member)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
