"""The bulk connections to one peer: opened on demand, at most four, closed when idle."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from contextlib import suppress

from kvstore.model.errors import Incompatible
from kvstore.peer.base import PeerCorrupt, PeerError, PeerGone, PeerIncompatible, PeerSlow
from kvstore.peer.bulk import Bulk
from kvstore.peer.control import Calls
from kvstore.peer.messages import BulkBody, Ticket, decode_ticket, encode
from kvstore.peer.seal import Opener, Sealer
from kvstore.peer.wire import BULK_MAGIC, OPENING, Kind

CONNECTIONS_MAX = 4
IDLE_S = 60.0
CONNECT_S = 2.0


class Connections:
    """address: of the peer's control connection. Lives on the event loop."""

    def __init__(self, calls: Calls, address: tuple[str, int], *, sealed: bool) -> None:
        self._calls = calls
        self._address = address
        self._sealed = sealed
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)
        self._idle: deque[tuple[float, Bulk]] = deque()
        self._taken: set[Bulk] = set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        return len(self._idle) + len(self._taken)

    async def take(self, deadline: float) -> tuple[Bulk, bool]:
        """Return a connection, and whether it was used before. Raises PeerError."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._free.acquire()
        except TimeoutError:
            message = f"all connections to {self._calls.name} are in use"
            raise PeerSlow(message, reason="deadline") from None
        try:
            while self._idle:
                _, bulk = self._idle.pop()
                if _is_silent(bulk.socket):
                    self._taken.add(bulk)
                    return bulk, True
                bulk.close()
            bulk = await self._opened(deadline)
            self._taken.add(bulk)
            return bulk, False
        except BaseException:
            self._free.release()
            raise

    def give(self, bulk: Bulk, *, good: bool) -> None:
        """Take a connection back. good: everything it was asked for was received."""
        self._taken.discard(bulk)
        self._free.release()
        if not good or not self._calls.open or not _is_silent(bulk.socket):
            bulk.close()
            return
        self._idle.append((time.monotonic(), bulk))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    def link_lost(self) -> None:
        """Close what is idle. What is under way may end well: a lender that stops has sent it."""
        if self._sweep is not None:
            self._sweep.cancel()
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close what is idle, and end what is under way."""
        self.link_lost()
        for bulk in self._taken:
            bulk.shut()  # its reader closes it

    def _close_idle(self) -> None:
        """Close what has not been used for a while; the oldest is at the left."""
        now = time.monotonic()
        while self._idle and now - self._idle[0][0] >= IDLE_S:
            self._idle.popleft()[1].close()
        self._sweep = None
        if self._idle:
            left_s = IDLE_S - (now - self._idle[0][0])
            self._sweep = asyncio.get_running_loop().call_later(left_s, self._close_idle)

    async def _opened(self, deadline: float) -> Bulk:
        body = encode(BulkBody(sealed=self._sealed))
        timeout_s = min(CONNECT_S, deadline - time.monotonic())
        ticket = self._ticket(await self._calls.call(Kind.BULK, body, timeout_s))
        if self._sealed and not ticket.send_key:
            raise PeerIncompatible(
                f"{self._calls.name} sends records in clear: see cluster.bulk", reason="bulk"
            )
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(min(CONNECT_S, deadline - time.monotonic())):
                await loop.sock_connect(connection, self._address)
                await loop.sock_sendall(connection, OPENING.pack(BULK_MAGIC, ticket.token))
            if not ticket.send_key:
                return Bulk(connection)
            return Bulk(connection, Sealer(ticket.send_key), Opener(ticket.receive_key))
        except TimeoutError:
            connection.close()
            raise PeerSlow(f"no connection to {self._calls.name} in time") from None
        except OSError as error:
            connection.close()
            why = error.strerror or str(error)
            raise PeerGone(f"no connection to {self._calls.name}: {why}") from error
        except BaseException:
            connection.close()
            raise

    def _ticket(self, answer: bytes) -> Ticket:
        """Read a ticket. One that cannot be ends the link."""
        try:
            return decode_ticket(answer)
        except Incompatible as error:
            wrong = PeerCorrupt(f"{self._calls.name}: {error}")
            self._calls.link.end(wrong)
            raise wrong from error


def _is_silent(connection: socket.socket) -> bool:
    """Say whether an idle connection may be used. One that has ended, or has bytes that nobody
    asked for, may not."""
    with suppress(BlockingIOError):
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False
    return True


__all__ = ["Connections", "PeerError"]
