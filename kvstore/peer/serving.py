"""One control connection of a peer that borrows: its requests, answered by the lender."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from kvstore.model.block import Namespace
from kvstore.model.errors import Incompatible, KVStoreError
from kvstore.model.member import Member
from kvstore.model.tenant import TenantId
from kvstore.peer.base import (
    HEADS_WAIT_S_MAX,
    READ_WAIT_S_MAX,
    PeerBusy,
    PeerCorrupt,
    PeerError,
    PeerGone,
    PeerIncompatible,
    PeerSlow,
)
from kvstore.peer.control import CALLS_MAX, FrameLink, refusal_of
from kvstore.peer.identity import Ourselves
from kvstore.peer.lenders import Lenders
from kvstore.peer.lending import Lending
from kvstore.peer.messages import (
    BULK_KEY_NBYTES,
    Refusal,
    Ticket,
    decode_bulk,
    decode_delete,
    decode_heads_ask,
    decode_hello,
    decode_keys,
    decode_match,
    decode_namespace,
    decode_parts,
    encode,
    tenant_of,
)
from kvstore.peer.onesided.grants import Grants
from kvstore.peer.onesided.mover import Mover
from kvstore.peer.trust import names_of
from kvstore.peer.wire import TOKEN_NBYTES, Frame, Kind

logger = logging.getLogger(__name__)

TICKETS_MAX = 8  # that are not used yet
TICKET_S = 5.0
REQUEST_S_MAX = 120.0


class Issued(NamedTuple):
    """A ticket that was handed out."""

    ticket: Ticket
    until: float


class Borrower:
    """A peer, from its connection on. greeted: resolves when its HELLO was accepted, or raises why
    not. refused: it is being told why. member: as its HELLO said, once it was accepted.

    What goes wrong later ends the link, and is counted.
    """

    def __init__(
        self,
        ourselves: Ourselves,
        lenders: Lenders,
        lending: Lending,
        *,
        movers: Mapping[str, Mover],
        on_lost: Callable[[Borrower], None],
        refused: Callable[[str], None],
    ) -> None:
        self._ourselves = ourselves
        self._lenders = lenders
        self._lending = lending
        self._on_lost = on_lost
        self._told = refused
        self.link = FrameLink(self._take, self._lost)
        self.member: Member | None = None
        self.refused = False
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bulks: set[asyncio.Task[None]] = set()
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._heads: set[TenantId] = set()  # whose are asked for: one question at a time
        self._grants = Grants(lending, movers, lambda: ourselves.member().instance)
        self._tickets: dict[bytes, Issued] = {}
        self._handlers: dict[int, Callable[[Frame], Awaitable[bytes]]] = {
            Kind.NAMESPACE: self._namespace,
            Kind.MATCH: self._match,
            Kind.ARRIVAL: self._arrival,
            Kind.BULK: self._bulk,
            Kind.HEADS: self._heads_of,
            Kind.CORRUPT: self._corrupt,
            Kind.DELETE: self._delete,
            Kind.GRANT: self._grant,
            Kind.HELD: self._grants.held,
            Kind.MEMORY: self._grants.memory,
        }

    def redeem(self, token: bytes) -> Ticket | None:
        """Take back a ticket, once. None: it is not of this link, or too old."""
        issued = self._tickets.pop(token, None)
        return issued.ticket if issued is not None and time.monotonic() < issued.until else None

    # ---- the link --------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        if self.member is None:
            self._greet(frame)
        elif frame.kind == Kind.PING:
            self.link.send(Frame(Kind.REPLY, frame.id, self._ourselves.hello()))
        elif frame.kind == Kind.CANCEL:
            if (request := self._requests.get(frame.id)) is not None:
                request.cancel()
        elif frame.id in self._requests or len(self._requests) >= CALLS_MAX:
            raise Incompatible("more requests than there may be")
        else:
            request = asyncio.get_running_loop().create_task(self._answer(frame))
            self._requests[frame.id] = request
            request.add_done_callback(lambda _: self._requests.pop(frame.id))

    def _greet(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise Incompatible("something else than HELLO")
        hello = decode_hello(frame.body)
        tls = self.link.info("ssl_object")
        try:
            self._ourselves.check(hello, names_of(tls) if tls is not None else ())
        except PeerIncompatible as error:
            if error.peer is not None:  # one with our id: it sees that in our own HELLO
                self.link.send(Frame(Kind.REPLY, frame.id, self._ourselves.hello()))
            else:
                self.link.send(Frame(Kind.ERROR, frame.id, encode(refusal_of(error))))
            self.refused = True
            self.link.finish()
            if not self.greeted.done():
                self.greeted.set_exception(error)
            return
        self.member = hello.member
        self.link.send(Frame(Kind.REPLY, frame.id, self._ourselves.hello()))
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _lost(self, error: PeerError) -> None:
        if isinstance(error, PeerCorrupt):
            self._told("garbage")
        elif isinstance(error, PeerSlow):
            self._told(error.outcome)
        for task in (*self._requests.values(), *self.bulks):
            task.cancel()
        self._grants.close()
        if not self.greeted.done():
            self.greeted.set_exception(error)
            self.greeted.exception()  # its waiter may be gone
        self._on_lost(self)

    def _refuse(self, frame: Frame, error: KVStoreError) -> None:
        refusal = refusal_of(error)
        if refusal.reason != "namespace":  # that it is asked to register one is usual
            self._told(refusal.reason)
        self.link.send(Frame(Kind.ERROR, frame.id, encode(refusal)))

    async def _answer(self, frame: Frame) -> None:
        handler = self._handlers.get(frame.kind)
        try:
            if handler is None:
                refusal = Refusal(reason="unknown", message=f"no requests of kind {frame.kind}")
                self.link.send(Frame(Kind.ERROR, frame.id, encode(refusal)))
                return
            async with asyncio.timeout(min(frame.timeout_s + 1.0, REQUEST_S_MAX)):
                body = await handler(frame)
            self.link.send(Frame(Kind.REPLY, frame.id, body))
        except Incompatible as error:
            self.link.end(PeerCorrupt(f"a peer asked {error}"))
        except KVStoreError as error:
            self._refuse(frame, error)
        except TimeoutError:
            self._refuse(frame, PeerGone("this took too long", reason="failed"))
        except Exception:  # whatever it is, the link goes on
            logger.exception("peer_request=failed kind=%d", frame.kind)
            self._refuse(frame, PeerGone("this daemon has failed", reason="failed"))

    # ---- requests --------------------------------------------------------------------------------

    async def _namespace(self, frame: Frame) -> bytes:
        body = decode_namespace(frame.body)
        lender = self._lenders.of(tenant_of(body.tenant))
        lender.register(Namespace.from_json(body.spec, body.name))
        return b""

    async def _match(self, frame: Frame) -> bytes:
        keys, body = decode_match(frame.body)
        tenant = tenant_of(body.tenant)
        lender = self._lenders.of(tenant)
        found = await lender.match(keys.namespace_id, keys.keys, body.skip, body.refined)
        return encode(replace(found, busy=found.busy or self._lending.busy(tenant)))

    async def _arrival(self, frame: Frame) -> bytes:
        keys, body = decode_parts(frame.body)
        lender = self._lenders.of(tenant_of(body.tenant))
        try:
            async with asyncio.timeout(min(frame.timeout_s, READ_WAIT_S_MAX)):
                await lender.arrival(keys.namespace_id, keys.keys, body.spans)
        except TimeoutError:
            pass  # the READ that follows says what is there
        return b""

    async def _bulk(self, frame: Frame) -> bytes:
        wanted = decode_bulk(frame.body)
        now = time.monotonic()
        self._tickets = {t: each for t, each in self._tickets.items() if each.until > now}
        if len(self._tickets) >= TICKETS_MAX:
            raise PeerBusy(f"{TICKETS_MAX} connections were asked for and not made")
        sealed = self._ourselves.sealed or wanted.sealed
        if sealed and self._ourselves.trust is None:
            raise PeerIncompatible("keys travel over TLS only", reason="bulk")
        ticket = Ticket(
            token=secrets.token_bytes(TOKEN_NBYTES),
            send_key=secrets.token_bytes(BULK_KEY_NBYTES) if sealed else b"",
            receive_key=secrets.token_bytes(BULK_KEY_NBYTES) if sealed else b"",
        )
        self._tickets[ticket.token] = Issued(ticket, now + TICKET_S)
        return encode(ticket)

    async def _grant(self, frame: Frame) -> bytes:
        assert self.member is not None
        return await self._grants.grant(frame, self.member.node)

    async def _heads_of(self, frame: Frame) -> bytes:
        ask = decode_heads_ask(frame.body)
        tenant = tenant_of(ask.tenant)
        lender = self._lenders.of(tenant)
        if tenant in self._heads:
            raise PeerBusy("heads are asked for already")
        self._heads.add(tenant)
        try:
            wait_s = min(ask.wait_s, HEADS_WAIT_S_MAX, frame.timeout_s)
            return encode(await lender.heads(replace(ask, wait_s=wait_s)))
        finally:
            self._heads.discard(tenant)

    async def _corrupt(self, frame: Frame) -> bytes:
        tenant, (namespace_id, keys) = decode_keys(frame.body)
        await self._lenders.of(tenant).corrupt(namespace_id, keys)
        return b""

    async def _delete(self, frame: Frame) -> bytes:
        tenant, namespace_id, keys = decode_delete(frame.body)
        await self._lenders.of(tenant).delete(namespace_id, keys)
        return b""
