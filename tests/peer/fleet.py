"""Two ends of a link in one process, and what is between them."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstore.model.member import Member, NodeId
from kvstore.peer.base import Lender
from kvstore.peer.identity import Ourselves
from kvstore.peer.lenders import Lenders
from kvstore.peer.server import PeerServer
from kvstore.peer.tcp import TcpLink, dial
from kvstore.peer.trust import Trust
from tests.tls import Authority

FLEET = "tests"
LENDER, BORROWER = NodeId("a" * 32), NodeId("b" * 32)
INSTANCES = {LENDER: "1" * 16, BORROWER: "2" * 16}


def ourselves(
    node: NodeId,
    *,
    fleet: str = FLEET,
    trust: Trust | None = None,
    sealed: bool = False,
    protocol: tuple[int, int] = (1, 1),
    instance: str | None = None,
) -> Ourselves:
    member = Member(
        node, instance or INSTANCES.get(node, "3" * 16), "127.0.0.1:1", protocol=protocol
    )
    return Ourselves(fleet, lambda: member, trust, sealed)


class Certificates:
    """An authority of a fleet, and what it gives to nodes."""

    def __init__(self, directory: Path) -> None:
        self._authority = Authority(directory)
        self.authority = self._authority.ca

    def trust(self, node: NodeId, *names: str, expired: bool = False) -> Trust:
        past = datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC) if expired else None
        files = self._authority.issue(
            node[:4], *(names or (f"{node}.{FLEET}.kvstore",)), not_after=past
        )
        return Trust(files.cert, files.key, self._authority.ca)


class Served:
    """A server of peers, and how to reach it. refused: how often, by word."""

    def __init__(self, me: Ourselves, lenders: Lenders, **limits: Any) -> None:
        self.refused: Counter[str] = Counter()
        self.server = PeerServer(me, lenders, refused=self._count, **limits)
        self.threads = ThreadPoolExecutor(4)

    def _count(self, word: str) -> None:
        self.refused[word] += 1

    async def dial(
        self, me: Ourselves, *, port: int = 0, expected: NodeId | None = LENDER
    ) -> TcpLink:
        return await dial(
            ("127.0.0.1", port or self.server.port),
            me,
            self.threads,
            expected=expected,
            deadline=time.monotonic() + 5.0,
        )


@asynccontextmanager
async def served(me: Ourselves, lender: Lender | Lenders, **limits: Any) -> AsyncIterator[Served]:
    """Serve a lender on loopback for the time of the context."""
    lenders = lender if isinstance(lender, Lenders) else Lenders.only(lender)
    found = Served(me, lenders, **limits)
    await found.server.start("127.0.0.1", 0)
    try:
        yield found
    finally:
        await found.server.close()
        found.threads.shutdown()
