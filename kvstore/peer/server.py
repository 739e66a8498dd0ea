"""The port at which peers reach this daemon: who is let in, and how many.

Control and bulk connections come to one port; their first bytes tell which they are. A connection
that has not said who it is after 2 s is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from kvstore.model.errors import ConfigError
from kvstore.model.member import NodeId
from kvstore.model.tenant import TenantId
from kvstore.peer.base import PeerBusy, PeerError, PeerGone, PeerIncompatible
from kvstore.peer.bulk import Bulk, tune
from kvstore.peer.connections import CONNECTIONS_MAX
from kvstore.peer.control import refusal_of
from kvstore.peer.identity import Ourselves
from kvstore.peer.lenders import Lenders
from kvstore.peer.lending import Lending
from kvstore.peer.messages import Ticket, encode
from kvstore.peer.onesided.mover import Mover
from kvstore.peer.seal import Opener, Sealer
from kvstore.peer.serving import Borrower
from kvstore.peer.trust import certificate_error
from kvstore.peer.wire import BULK_MAGIC, OPENING, Frame, Kind
from kvstore.system.descriptors import links_max
from kvstore.transport.arena_wire import readable

logger = logging.getLogger(__name__)

HELLO_S = 2.0
OPENINGS_MAX = 128  # that have not said who they are
OPENINGS_OF_ONE_MAX = 32  # of one address
ALL_MAX = 4096  # connections
LINKS_OF_ONE_MAX = 2  # of a node: one that ends, and the next
BACKLOG = 256
_PEEK_S = 0.01
_TLS_HANDSHAKE = 0x16
_TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x28"  # fatal, handshake_failure: no TLS here
_HELLO_ID = 1


class PeerServer:
    """Serves peers from `start` to `close`. port: where.

    refused: is told a word for each connection and request that was not served. lent: whose bytes
    were sent, and how many, of each read that was. movers: by which peers may read one-sided; they
    are looked at for each request.
    """

    def __init__(
        self,
        ourselves: Ourselves,
        lenders: Lenders,
        *,
        serve_reads: int = 8,
        bytes_per_s: int = 0,
        refused: Callable[[str], None] = lambda word: None,
        lent: Callable[[TenantId, int], None] = lambda tenant, nbytes: None,
        movers: Mapping[str, Mover] = MappingProxyType({}),
    ) -> None:
        self._ourselves = ourselves
        self._lenders = lenders
        self._refused = refused
        self.lending = Lending(
            lenders,
            lambda: ourselves.member().instance,
            serve_reads=serve_reads,
            bytes_per_s=bytes_per_s,
            refused=refused,
            lent=lent,
        )
        self._movers = movers
        self.port = 0
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._openings: Counter[str] = Counter()
        self._borrowers: dict[NodeId, list[Borrower]] = {}

    @property
    def connections(self) -> int:
        """How many there are, of every kind."""
        links = [each for some in self._borrowers.values() for each in some]
        return self._openings.total() + len(links) + sum(len(each.bulks) for each in links)

    @property
    def sent_nbytes(self) -> Mapping[tuple[NodeId, TenantId], int]:
        """What each node was sent of each tenant since the start."""
        return self.lending.sent_nbytes

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises ConfigError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"cluster.listen={host}:{port} cannot be had ({why}): choose another address"
            ) from error
        listener.setblocking(False)
        self._listener = listener
        self.port = listener.getsockname()[1]
        self._keep(self._accept(listener))

    def drain(self) -> None:
        """Lend nothing more; what is under way goes on."""
        self.lending.draining = True

    async def close(self) -> None:
        """End everything, and wait until no thread sends any more, unless a disk hangs."""
        if self._listener is not None:
            self._listener.close()
        links = [each for some in self._borrowers.values() for each in some]
        for each in links:
            each.link.end(PeerGone("this daemon stops", reason="closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lending.close()

    # ---- connections -----------------------------------------------------------------------------

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor left, or it ended before it began
                logger.warning("peer_accept=failed reason=%r", str(error))
                await asyncio.sleep(0.1)
                continue
            host = str(address[0])
            if (
                self._openings.total() >= OPENINGS_MAX
                or self._openings[host] >= OPENINGS_OF_ONE_MAX
                or self.connections >= links_max(ALL_MAX)
            ):
                self._refused("connections")
                connection.close()
                await asyncio.sleep(0)  # one that is there already is accepted without a wait
                continue
            connection.setblocking(False)
            self._openings[host] += 1
            opening = self._keep(self._open(connection))
            opening.add_done_callback(partial(self._opened, connection, host))

    def _opened(self, connection: socket.socket, host: str, opening: asyncio.Task[None]) -> None:
        self._openings[host] -= 1
        if not self._openings[host]:
            del self._openings[host]
        if opening.cancelled():
            connection.close()

    async def _open(self, connection: socket.socket) -> None:
        """Find out who is there, for at most HELLO_S."""
        try:
            async with asyncio.timeout(HELLO_S):
                start = await _first_bytes(connection)
                if start == BULK_MAGIC:
                    await self._open_bulk(connection)
                    return
                await self._open_control(connection, tls=start[0] == _TLS_HANDSHAKE)
                return
        except TimeoutError:
            self._end(connection, "hello")
        except PeerError as error:
            self._end(connection, error.reason)
        except OSError:
            self._end(connection, "connection")

    def _end(self, connection: socket.socket, word: str) -> None:
        connection.close()
        self._refused(word)

    async def _open_control(self, connection: socket.socket, *, tls: bool) -> None:
        """Greet a peer. Raises PeerError, OSError, TimeoutError; then the connection is over."""
        trust = self._ourselves.trust
        if tls != (trust is not None):
            await _refuse_tls(connection, tls=tls)
        loop = asyncio.get_running_loop()
        borrower = Borrower(
            self._ourselves,
            self._lenders,
            self.lending,
            movers=self._movers,
            on_lost=self._forget,
            refused=self._refused,
        )
        tune(connection)
        owned = socket.socket(fileno=connection.detach())  # from here on by its transport
        try:
            await loop.connect_accepted_socket(
                lambda: borrower.link,
                sock=owned,
                ssl=trust.accepting() if trust is not None else None,
                ssl_handshake_timeout=HELLO_S if trust is not None else None,
            )
            await borrower.greeted
        except ssl.SSLError as error:
            raise certificate_error(error, "a peer") from error
        except BaseException:
            if not borrower.refused:  # else it still reads why
                borrower.link.end(PeerGone("no HELLO in time", reason="closed"))
            raise
        assert borrower.member is not None
        links = self._borrowers.setdefault(borrower.member.node, [])
        links.append(borrower)
        if len(links) > LINKS_OF_ONE_MAX:
            links[0].link.end(PeerGone("the same node has connected again", reason="closed"))

    def _forget(self, borrower: Borrower) -> None:
        node = borrower.member.node if borrower.member is not None else NodeId("")
        links = self._borrowers.get(node, [])
        if borrower in links:
            links.remove(borrower)
            if not links:
                del self._borrowers[node]

    async def _open_bulk(self, connection: socket.socket) -> None:
        opening = memoryview(bytearray(OPENING.size))
        at = 0
        while at < len(opening):
            count = await asyncio.get_running_loop().sock_recv_into(connection, opening[at:])
            if not count:
                raise PeerGone("a connection ended before its token", reason="connection")
            at += count
        borrower, ticket = self._redeemed(OPENING.unpack(opening)[1])
        if len(borrower.bulks) >= 2 * CONNECTIONS_MAX:  # some may have ended without our knowing
            raise PeerBusy("a peer has too many connections", reason="connections")
        if ticket.send_key:  # what the peer sends, we open
            bulk = Bulk(connection, Sealer(ticket.receive_key), Opener(ticket.send_key))
        else:
            bulk = Bulk(connection)
        task = self._keep(self._serve(bulk, borrower))
        task.add_done_callback(lambda _: bulk.close())  # it may be cancelled before it begins
        borrower.bulks.add(task)
        task.add_done_callback(borrower.bulks.discard)

    def _redeemed(self, token: bytes) -> tuple[Borrower, Ticket]:
        for links in self._borrowers.values():
            for borrower in links:
                ticket = borrower.redeem(token)
                if ticket is not None:
                    return borrower, ticket
        raise PeerIncompatible("a bulk connection without a ticket", reason="token")

    async def _serve(self, bulk: Bulk, borrower: Borrower) -> None:
        assert borrower.member is not None
        node = borrower.member.node
        try:
            await self.lending.serve(bulk, node)
        except TimeoutError:
            pass  # idle
        except PeerError as error:
            if not isinstance(error, PeerGone):
                self._refused(error.outcome)
            logger.debug("lending=ended node=%s reason=%r", node[:8], str(error))
        except Exception:
            logger.exception("lending=failed node=%s", node[:8])
            self._refused("failed")


async def _first_bytes(connection: socket.socket) -> bytes:
    """Return the first bytes of a connection, which stay unread. Raises PeerGone, OSError."""
    while True:
        await readable(connection.fileno())
        start = connection.recv(len(BULK_MAGIC), socket.MSG_PEEK)
        if not start:
            raise PeerGone("a connection ended before it began", reason="connection")
        if len(start) == len(BULK_MAGIC):
            return start
        await asyncio.sleep(_PEEK_S)


async def _refuse_tls(connection: socket.socket, *, tls: bool) -> None:
    """Tell a peer that one side has TLS, and the other not. Raises PeerIncompatible."""
    error = PeerIncompatible(
        "one daemon has certificates, the other none: see cluster.cert", reason="tls"
    )
    refusal = Frame(Kind.ERROR, _HELLO_ID, encode(refusal_of(error)))
    with suppress(OSError):
        connection.recv(1 << 16)  # what is unread when it closes would make it a reset
        await asyncio.get_running_loop().sock_sendall(
            connection, _TLS_ALERT if tls else refusal.encode()
        )
    raise error
