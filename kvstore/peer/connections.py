"""The bulk connections to one peer: opened on demand, at most four, closed when idle.

The next read is asked for on a connection while one is on its way, so that its bytes follow at
once. They come in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque

from kvstore.model.errors import Incompatible
from kvstore.peer.base import PeerCorrupt, PeerGone, PeerIncompatible, PeerSlow
from kvstore.peer.bulk import Bulk
from kvstore.peer.control import Calls
from kvstore.peer.messages import BulkBody, Ticket, decode_ticket, encode
from kvstore.peer.seal import Opener, Sealer
from kvstore.peer.wire import BULK_MAGIC, OPENING, Frame, Kind

CONNECTIONS_MAX = 4
READS_MAX = 2  # asked for on one connection: the next is found while one is on its way
IDLE_S = 60.0
CONNECT_S = 2.0


class ConnectionEnded(Exception):
    """A connection ended before a read on it had its turn: it may be asked for on another one."""


class Lane:
    """One connection, and the reads asked for on it, in order.

    bulk: None until the first of them opens it. used: a read of it has ended well. ended: nothing
    more comes of it.
    """

    def __init__(self) -> None:
        self.bulk: Bulk | None = None
        self.turns: deque[Turn] = deque()
        self.used = False
        self.ended = False
        self.idle_since = 0.0
        self.sending = asyncio.Lock()


class Turn:
    """The place of one read on its connection. begun: the reads before it are over, or it ended."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def bulk(self) -> Bulk:
        assert self.lane.bulk is not None
        return self.lane.bulk

    def begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)


class Connections:
    """address: of the peer's control connection. Lives on the event loop."""

    def __init__(self, calls: Calls, address: tuple[str, int], *, sealed: bool) -> None:
        self._calls = calls
        self._address = address
        self._sealed = sealed
        self._free = asyncio.Semaphore(CONNECTIONS_MAX * READS_MAX)
        self._lanes: list[Lane] = []
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        return len(self._lanes)

    async def take(self, deadline: float) -> Turn:
        """Return a place for a read on a connection, to be given back. Raises PeerSlow."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._free.acquire()
        except TimeoutError:
            message = f"all connections to {self._calls.name} are in use"
            raise PeerSlow(message, reason="deadline") from None
        lane = self._lane()
        turn = Turn(lane)
        lane.turns.append(turn)
        if lane.turns[0] is turn:
            turn.begin()
        return turn

    def _lane(self) -> Lane:
        """Return the connection on which a read is over first: an idle one, a new one, or the one
        with the fewest reads."""
        for lane in sorted(self._lanes, key=lambda lane: -lane.idle_since):
            if not lane.turns and lane.bulk is not None:
                if _is_silent(lane.bulk.socket):
                    return lane
                self._end(lane)
        if len(self._lanes) < CONNECTIONS_MAX:
            self._lanes.append(Lane())
            return self._lanes[-1]
        return min(self._lanes, key=lambda lane: len(lane.turns))

    async def ask(self, turn: Turn, frame: Frame, deadline: float) -> None:
        """Send a read's request, on a connection that is opened for it if need be.

        Raises PeerError; ConnectionEnded if the connection ended meanwhile."""
        lane = turn.lane
        async with lane.sending:
            if lane.bulk is None and not lane.ended:
                lane.bulk = await self._opened(deadline)
            if lane.ended:
                raise ConnectionEnded
            await turn.bulk.send(frame)

    def give(self, turn: Turn, *, good: bool) -> None:
        """Take a place back. good: everything it was asked for was received; else the connection
        ends, and the other reads on it are to be asked for again."""
        self._free.release()
        lane = turn.lane
        lane.turns.remove(turn)
        lane.used |= good
        if not good and not lane.ended:
            self._end(lane)
        if lane.ended:
            _close_unused(lane)
        elif lane.turns:
            lane.turns[0].begin()
        elif not self._calls.open or not _is_silent(turn.bulk.socket):
            self._end(lane)
        else:
            lane.idle_since = time.monotonic()
            if self._sweep is None:
                self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    def link_lost(self) -> None:
        """Close what is idle. What is under way may end well: a lender that stops has sent it."""
        if self._sweep is not None:
            self._sweep.cancel()
        for lane in [lane for lane in self._lanes if not lane.turns]:
            self._end(lane)

    def close(self) -> None:
        """Close what is idle, and end what is under way."""
        self.link_lost()
        for lane in list(self._lanes):
            self._end(lane)

    def _end(self, lane: Lane) -> None:
        """End a connection. Its socket is closed when the last of its reads is given back: a thread
        may still be at it."""
        lane.ended = True
        self._lanes.remove(lane)
        if lane.bulk is not None:
            lane.bulk.shut()
        for turn in lane.turns:
            turn.begin()
        _close_unused(lane)

    def _close_idle(self) -> None:
        """Close what has not been used for a while."""
        now = time.monotonic()
        idle = [lane for lane in self._lanes if not lane.turns]
        for lane in idle:
            if now - lane.idle_since >= IDLE_S:
                self._end(lane)
        self._sweep = None
        left = [IDLE_S - (now - lane.idle_since) for lane in idle if not lane.ended]
        if left:
            self._sweep = asyncio.get_running_loop().call_later(min(left), self._close_idle)

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


def _close_unused(lane: Lane) -> None:
    if not lane.turns and lane.bulk is not None:
        lane.bulk.close()


def _is_silent(connection: socket.socket) -> bool:
    """Say whether an idle connection may be used. One that has ended or failed, or has bytes that
    nobody asked for, may not."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:  # it was reset, or nobody has confirmed what was sent last
        return False
    return False
