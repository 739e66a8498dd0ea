"""A peer over TCP: one control connection, and bulk connections as they are needed.

dial -> HELLO both ways -> TcpLink
read -> READ on a bulk connection, its head on the event loop -> `fill` in a thread
"""

from __future__ import annotations

import asyncio
import copy
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvstore.model.block import BlockKey, Namespace, NamespaceId, Span
from kvstore.model.errors import Incompatible, InvalidRequest, UnknownNamespace
from kvstore.model.member import Member, NodeId
from kvstore.model.tenant import NO_TENANT_ID, TenantId
from kvstore.peer.base import (
    KEYS_MAX,
    NAMED_KEYS_MAX,
    READ_WAIT_S_MAX,
    HeadsAsk,
    HeadsReply,
    Incoming,
    PeerCorrupt,
    PeerGone,
    PeerIncompatible,
    PeerMatch,
    PeerSlow,
)
from kvstore.peer.connections import Connections
from kvstore.peer.control import GRACE_S, Calls
from kvstore.peer.identity import Ourselves
from kvstore.peer.incoming import Reads, check_read
from kvstore.peer.messages import (
    KeysBody,
    MatchBody,
    NamespaceBody,
    PartsBody,
    decode_heads_reply,
    decode_hello,
    decode_match_reply,
    encode,
)
from kvstore.peer.onesided.mover import Mover
from kvstore.peer.onesided.reads import OneSidedReads
from kvstore.peer.trust import certificate_error, names_of
from kvstore.peer.wire import TENANTS_SINCE, Kind

CONNECT_S = 2.0
HELLO_S = 2.0
NAMESPACE_S = 2.0
LINK_S_MAX = 3600.0  # with TLS: then both sides show their certificates again

T = TypeVar("T")


class TcpLink:
    """One peer. Implements `PeerLink`. `dial` makes it."""

    def __init__(
        self,
        peer: Member,
        calls: Calls,
        ourselves: Ourselves,
        threads: Executor,
        *,
        version: int,
    ) -> None:
        """version: of the protocol, that both speak."""
        self.peer = peer
        self.name = calls.name
        self._version = version
        self._tenant = b""  # on the wire: see `messages.Body`
        self._calls = calls
        self._ends_at = time.monotonic() + LINK_S_MAX if ourselves.trust else float("inf")
        address = calls.link.info("peername")
        connections = Connections(calls, address[:2], sealed=ourselves.sealed)
        calls.on_lost = self._lost
        self.reads = Reads(connections, threads, name=self.name, instance=peer.instance)
        self.onesided: OneSidedReads | None = None

    def read_onesided(self, mover: Mover) -> None:
        """From now on, read what lies in the peer's memory by a driver that it has as well."""
        self.onesided = OneSidedReads(
            self._calls, mover, self.reads.threads, name=self.name, instance=self.peer.instance
        )

    @property
    def medium(self) -> str:
        """One word: how records travel, unless they lie in files."""
        usable = self.onesided is not None and self.onesided.usable
        return self.onesided.mover.name if self.onesided is not None and usable else "tcp"

    @property
    def read_bytes(self) -> dict[str, int]:
        """How many bytes of records have come, by how."""
        onesided = self.onesided.read_nbytes if self.onesided is not None else 0
        return {"tcp": self.reads.received_nbytes, "onesided": onesided}

    def _lost(self) -> None:
        self.reads.connections.link_lost()
        if self.onesided is not None:
            self.onesided.close()

    @property
    def fault(self) -> PeerCorrupt | None:
        error = self._calls.error
        return error if isinstance(error, PeerCorrupt) else None

    def of(self, tenant: TenantId) -> TcpLink:
        """See `PeerLink`."""
        link = copy.copy(self)
        link._tenant = tenant if tenant != NO_TENANT_ID else b""
        return link

    @property
    def open(self) -> bool:
        return self._calls.open

    @property
    def worn(self) -> bool:
        """Whether to dial anew: certificates may have changed since this link began."""
        return time.monotonic() > self._ends_at

    async def match(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        refined: bool = False,
        registers: bool = True,
        deadline: float,
    ) -> PeerMatch:
        """See `PeerLink`."""
        _check_count(keys, KEYS_MAX)
        packed = b"".join(keys)
        body = MatchBody(
            tenant=self._tenant,
            namespace=namespace.id,
            keys=packed,
            skip=skip_blocks,
            refined=refined,
        )
        call = partial(self._call, Kind.MATCH, encode(body), deadline)
        try:
            answer = await (self._registered(namespace, call, deadline) if registers else call())
        except UnknownNamespace:
            return PeerMatch(0, 0)
        return self._decoded(partial(decode_match_reply, answer, keys=len(keys)))

    async def read(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        refined: bool = False,
        wait_s: float = 0.0,
        deadline: float,
    ) -> Incoming:
        """See `PeerLink`."""
        _check_count(keys, KEYS_MAX)
        sizes_max, varies = check_read(namespace, len(keys), spans)
        packed = b"".join(keys)
        parts = PartsBody(
            tenant=self._tenant,
            namespace=namespace.id,
            keys=packed,
            spans=tuple(spans),
            refined=refined,
        )
        body = encode(parts)
        self._check_version()
        if wait_s > 0:
            arrival = partial(self._arrival, body, min(wait_s, READ_WAIT_S_MAX), deadline)
            await self._registered(namespace, arrival, deadline)
        if self.onesided is not None:
            grant = partial(self.onesided.begin, body, sizes_max, varies, deadline)
            granted = await self._registered(namespace, grant, deadline)
            if granted is not None:
                return granted
        begin = partial(self.reads.begin, body, sizes_max, varies, deadline)
        return await self._registered(namespace, begin, deadline)

    async def heads(self, ask: HeadsAsk, *, deadline: float) -> HeadsReply:
        """See `PeerLink`."""
        named = replace(ask, tenant=self._tenant)
        answer = await self._call(Kind.HEADS, encode(named), deadline)
        found = self._decoded(partial(decode_heads_reply, answer, ask=ask))
        if found.instance != self.peer.instance:
            raise PeerCorrupt(f"{self.name} tells heads of another start of it")
        return found

    async def corrupt(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, deadline: float
    ) -> None:
        """See `PeerLink`."""
        _check_count(keys, NAMED_KEYS_MAX)
        body = KeysBody(tenant=self._tenant, namespace=namespace_id, keys=b"".join(keys))
        await self._known(self._call(Kind.CORRUPT, encode(body), deadline))

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None, *, deadline: float
    ) -> None:
        """See `PeerLink`."""
        _check_count(keys or (), NAMED_KEYS_MAX)
        packed = b"".join(keys) if keys is not None else None
        body = KeysBody(tenant=self._tenant, namespace=namespace_id or b"", keys=packed)
        await self._known(self._call(Kind.DELETE, encode(body), deadline))

    async def ping(self, deadline: float) -> float:
        """See `PeerLink`."""
        began = time.monotonic()
        answer = await self._call(Kind.PING, b"", deadline)
        member = self._decoded(lambda: decode_hello(answer)).member
        if (member.node, member.instance) != (self.peer.node, self.peer.instance):
            gone = PeerGone(f"{self.name} is another daemon now", reason="closed")
            self._calls.link.end(gone)
            raise gone
        self.peer = member
        return time.monotonic() - began

    async def close(self) -> None:
        """See `PeerLink`."""
        self._calls.link.end(PeerGone(f"the link to {self.name} was closed", reason="closed"))
        self.reads.connections.close()

    def _check_version(self) -> None:
        """Raise PeerIncompatible if the peer would not look at the tenant that is named."""
        if self._tenant and self._version < TENANTS_SINCE:
            raise PeerIncompatible(
                f"{self.name} knows no tenants: upgrade it", reason="tenant", peer=self.peer
            )

    async def _call(self, kind: Kind, body: bytes, deadline: float) -> bytes:
        self._check_version()
        return await self._calls.call(kind, body, deadline - time.monotonic())

    async def _arrival(self, body: bytes, wait_s: float, deadline: float) -> bytes:
        left_s = deadline - time.monotonic()
        told_s = max(0.0, min(wait_s, left_s - GRACE_S))
        return await self._calls.call(
            Kind.ARRIVAL, body, min(left_s, wait_s + GRACE_S), told_s=told_s
        )

    async def _registered(
        self, namespace: Namespace, ask: Callable[[], Awaitable[T]], deadline: float
    ) -> T:
        """Ask, and register the namespace if the peer does not know it."""
        try:
            return await ask()
        except UnknownNamespace:
            body = encode(
                NamespaceBody(tenant=self._tenant, spec=namespace.to_json(), name=namespace.name)
            )
            timeout_s = min(NAMESPACE_S, deadline - time.monotonic())
            await self._calls.call(Kind.NAMESPACE, body, timeout_s)
        return await self._known(ask())

    async def _known(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except UnknownNamespace as error:
            raise PeerGone(f"{self.name}: {error}", reason="failed") from error

    def _decoded(self, decode: Callable[[], T]) -> T:
        """Return what a peer answered. An answer that cannot be ends the link."""
        try:
            return decode()
        except Incompatible as error:
            wrong = PeerCorrupt(f"{self.name}: {error}")
            self._calls.link.end(wrong)
            raise wrong from error


async def dial(
    address: tuple[str, int],
    ourselves: Ourselves,
    threads: Executor,
    *,
    expected: NodeId | None = None,
    deadline: float,
) -> TcpLink:
    """Connect to a daemon and greet it.

    threads: receive records, of all links together. expected: who should be there. Raises
    PeerError.
    """
    name = f"the peer at {address[0]}:{address[1]}"
    calls = Calls(name)
    try:
        await _connect(calls, address, ourselves, min(deadline, time.monotonic() + CONNECT_S))
        hello = decode_hello(await _greeting(calls, ourselves, deadline))
        tls = calls.link.info("ssl_object")
        names = names_of(tls) if tls is not None else ()
        version = ourselves.check(hello, names, expected)
    except Incompatible as error:
        calls.link.end(PeerGone("not a peer", reason="closed"))
        raise PeerCorrupt(f"{name}: {error}") from error
    except BaseException:
        calls.link.end(PeerGone("the link was not made", reason="closed"))
        raise
    calls.name = f"peer {hello.member.node[:8]} at {address[0]}:{address[1]}"
    return TcpLink(hello.member, calls, ourselves, threads, version=version)


async def _greeting(calls: Calls, ourselves: Ourselves, deadline: float) -> bytes:
    timeout_s = min(HELLO_S, deadline - time.monotonic())
    try:
        return await calls.call(Kind.HELLO, ourselves.hello(), timeout_s)
    except PeerGone as error:
        if ourselves.trust is None or error.reason != "connection":
            raise
        # In TLS 1.3 our end is ready before the other one has looked at our certificate.
        raise PeerIncompatible(
            f"{calls.name} ended the connection when it saw our certificate, cluster.cert: it may "
            "be expired, or of an authority that it does not believe. Its own log says which",
            reason="certificate",
        ) from error


async def _connect(
    calls: Calls, address: tuple[str, int], ourselves: Ourselves, deadline: float
) -> None:
    trust = ourselves.trust
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await asyncio.get_running_loop().create_connection(
                lambda: calls.link,
                *address,
                ssl=trust.dialing() if trust is not None else None,
                server_hostname="" if trust is not None else None,
            )
    except TimeoutError:
        raise PeerSlow(f"{calls.name} does not accept connections", reason="deadline") from None
    except ssl.SSLError as error:
        raise certificate_error(error, calls.name) from error
    except UnicodeError as error:  # of a label that IDNA refuses
        raise PeerGone(f"{calls.name} cannot be reached: no host has that name") from error
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        raise PeerGone(f"{calls.name} cannot be reached: {why}") from error


def _check_count(keys: Sequence[BlockKey], most: int) -> None:
    if len(keys) > most:
        raise InvalidRequest(f"{len(keys)} keys for a peer; the limit is {most}")
