"""A `PeerLink` over the simulated network.

Of a link whose other end is gone, calls fail at once if its machine still answers, else after their
deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any, ClassVar, TypeVar

from kvstore.model.block import BlockKey, Namespace, NamespaceId, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import Incompatible, KVStoreError, UnknownNamespace
from kvstore.model.member import Member, NodeId
from kvstore.model.tenant import TenantId
from kvstore.peer.base import (
    READ_WAIT_S_MAX,
    HeadsAsk,
    HeadsReply,
    Loan,
    PeerBusy,
    PeerCorrupt,
    PeerGone,
    PeerIncompatible,
    PeerMatch,
    PeerSlow,
)
from kvstore.peer.control import GRACE_S
from kvstore.peer.incoming import check_read
from kvstore.peer.messages import (
    decode_heads_reply,
    decode_match_reply,
    decode_read_head,
    encode,
)
from kvstore.peer.receive import check_wrong
from kvstore.store.lender import StoreLender
from tests.sim.fleet.network import Network
from tests.sim.fleet.serving import READS_MAX, Ask, SimServer, Stream

T = TypeVar("T")
SEND_S_MAX = 30.0
HELLO_S = 2.0


class SimIncoming:
    """One READ under way. Implements `Incoming`. verifies: as the driver does; off in a test."""

    verifies = True
    limbo = None

    def __init__(
        self, link: SimLink, stream: Stream, sizes: Sequence[int], sums: Sequence[int], until: float
    ) -> None:
        self.sizes, self.checksums = sizes, sums
        self._link = link
        self._stream: Stream | None = stream
        self._until = until

    async def fill(self, targets: Sequence[memoryview | None]) -> None:
        stream = self._stream
        assert stream is not None, "a read is filled once"
        try:
            held = await self._received(stream, targets)
        finally:
            await self.close()
        if not held:
            raise PeerGone("the lease was over too soon", reason="lease")
        wrong = [
            at
            for at, (target, value) in enumerate(zip(targets, self.checksums, strict=True))
            if target is not None and self.sizes[at] and checksum(target) != value
        ]
        if self.verifies:
            check_wrong(wrong, f"peer {self._link.peer.node[:8]}")

    async def _received(self, stream: Stream, targets: Sequence[memoryview | None]) -> bool:
        while True:
            kind, content = await stream.receive(self._until)
            if kind == "held":
                return bool(content)
            at, begin, data = content
            target = targets[at]
            if target is not None:
                target[begin : begin + len(data)] = data

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._link.streams.pop(stream, None)
            stream.end(PeerGone("the reader has gone", reason="closed"))


class SimLink:
    """One peer. Implements `PeerLink`. now: the borrower's clock. source: the borrower's node."""

    worn = False
    fault = None
    medium = "tcp"
    read_bytes: ClassVar[dict[str, int]] = {}
    numbers = 0

    def __init__(
        self, network: Network, server: SimServer, source: str, now: Callable[[], float]
    ) -> None:
        SimLink.numbers += 1
        self.number = SimLink.numbers
        self.network = network
        self.server = server
        self.source = source
        self.peer = server.member()
        self.streams: dict[Stream, None] = {}  # in the order in which they began
        self._now = now
        self._closed = False
        self._heads = 0
        self._waiting: dict[asyncio.Future[Any], None] = {}
        network.links.add(self)

    def of(self, tenant: TenantId) -> SimLink:
        return self

    @property
    def open(self) -> bool:
        return not self._closed

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
        async def ask(lender: StoreLender) -> bytes:
            found = await lender.match(namespace.id, keys, skip_blocks, refined)
            busy = self.server.draining or self.server.reads >= READS_MAX
            return encode(PeerMatch(found.hit_blocks, found.resident_blocks, busy))

        answer = await self._registered(namespace, ask, deadline)
        data = self.network.flip(answer)
        return self._decoded(partial(decode_match_reply, data, keys=len(keys)))

    async def read(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        refined: bool = False,
        wait_s: float = 0.0,
        deadline: float,
    ) -> SimIncoming:
        check_read(namespace, len(keys), spans)
        if wait_s > 0:
            await self._registered(
                namespace,
                lambda lender: self._arrival(lender, namespace.id, keys, spans, wait_s),
                deadline,
            )

        def lend(lender: StoreLender) -> Awaitable[Loan]:
            return lender.lend(namespace.id, keys, spans, refined, NodeId(self.source))

        begin = partial(self._begin, lend, sum(span.end - span.begin for span in spans), deadline)
        try:
            return await begin()
        except UnknownNamespace:
            await self._register(namespace, deadline)
        return await self._known(begin())

    async def _arrival(
        self,
        lender: StoreLender,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        wait_s: float,
    ) -> None:
        try:
            async with asyncio.timeout(min(wait_s, READ_WAIT_S_MAX)):
                await lender.arrival(namespace_id, keys, spans)
        except TimeoutError:
            return  # the READ that follows says what is there

    async def _begin(self, lend: Ask, records: int, deadline: float) -> SimIncoming:
        loop = asyncio.get_running_loop()
        left_s = deadline - self._now()
        if left_s <= 0 or not self.open:
            raise PeerGone("no open link, or no time", reason="closed")
        until, stream = loop.time() + left_s, Stream(self)
        self.streams[stream] = None

        async def asked() -> None:
            if await self.network.travel(self.source, self.server.node) and not self.server.dead:
                work = self.server.serve_read(stream, lend, min(until, loop.time() + SEND_S_MAX))
                self.server.start(work)

        loop.create_task(asked(), context=Context())
        incoming = SimIncoming(self, stream, (), (), until)
        try:
            _, head = await stream.receive(until)
            answer = decode_read_head(head, records=records)
            if answer.instance != self.peer.instance:
                raise PeerGone("it is another start", reason="lease")
        except BaseException:
            await incoming.close()
            raise
        incoming.sizes, incoming.checksums = answer.sizes, answer.checksums
        return incoming

    async def heads(self, ask: HeadsAsk, *, deadline: float) -> HeadsReply:
        async def asked(lender: StoreLender) -> bytes:
            if self._heads:
                raise PeerBusy("heads are asked for already")
            self._heads += 1
            try:
                return encode(await lender.heads(ask))
            finally:
                self._heads -= 1

        data = self.network.flip(await self._call(asked, deadline, sure=True))
        found = self._decoded(partial(decode_heads_reply, data, ask=ask))
        if found.instance != self.peer.instance:
            raise PeerCorrupt("heads of another start of it")
        return found

    async def corrupt(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, deadline: float
    ) -> None:
        await self._known(self._call(lambda lender: lender.corrupt(namespace_id, keys), deadline))

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None, *, deadline: float
    ) -> None:
        async def ask(lender: StoreLender) -> None:
            await self.network.hold_up()
            await lender.delete(namespace_id, keys)

        await self._known(self._call(ask, deadline))

    async def ping(self, deadline: float) -> float:
        async def ask(_: StoreLender) -> Member:
            return self.server.member()

        began = self._now()
        self.peer = await self._call(ask, deadline)
        return self._now() - began

    async def close(self) -> None:
        self._end(PeerGone("the link was closed", reason="closed"))

    def abandon(self) -> None:
        """Its borrower is dead."""
        self._end(PeerGone("the borrower is gone", reason="closed"))

    def hang_up(self) -> None:
        """The other end is gone; who can be reached learns it at once."""
        if self.network.passes(self.server.node, self.source):
            self._end(PeerGone("the other end is gone", reason="closed"))

    def _end(self, error: PeerGone | PeerCorrupt) -> None:
        self._closed = True
        self.network.links.discard(self)
        for reply in list(self._waiting):
            if not reply.done():
                reply.set_exception(type(error)(str(error), reason=error.reason))
        for stream in list(self.streams):
            stream.end(PeerGone(str(error), reason="closed"))

    # ---- calls -----------------------------------------------------------------------------------

    async def _call(self, ask: Ask, deadline: float, *, sure: bool = False) -> Any:
        """Ask the other end. sure: sent again until it arrives, as a connection does that lasts.
        Raises PeerError, UnknownNamespace."""
        if not self.open:
            raise PeerGone("the link is not open", reason="closed")
        timeout_s = deadline - self._now()
        if timeout_s <= 0:
            raise PeerSlow("no time left to ask", reason="deadline")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting[reply] = None
        requests = [
            loop.create_task(self._request(ask, timeout_s, reply, sure=sure), context=Context())
            for _ in range(1 if sure else self.network.copies())
        ]
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await reply
        except TimeoutError:
            raise PeerSlow("no answer in time", reason="deadline") from None
        finally:
            del self._waiting[reply]
            if reply.cancelled() or not reply.done():
                for request in requests:
                    loop.create_task(self._cancel(request), context=Context())

    async def _request(
        self, ask: Ask, timeout_s: float, reply: asyncio.Future[Any], *, sure: bool
    ) -> None:
        """Carry a request, and its answer."""
        server = self.server
        if not await self._travel(self.source, server.node, sure=sure):
            return
        if server.dead:
            if not server.silent:
                self.hang_up()
            return
        answering: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = server.start(_answer(server.answered(ask, timeout_s), answering))
        try:
            await asyncio.wait([answering, task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if not answering.done() or server.dead:
            return
        error = answering.exception()
        arrived = await self._travel(server.node, self.source, sure=sure)
        if arrived and not reply.done():
            reply.set_exception(error) if error else reply.set_result(answering.result())

    async def _travel(self, source: str, target: str, *, sure: bool) -> bool:
        if sure:
            await self.network.get_through(source, target)
        return sure or await self.network.travel(source, target)

    async def _cancel(self, request: asyncio.Task[None]) -> None:
        if await self.network.travel(self.source, self.server.node):
            request.cancel()

    async def _registered(self, namespace: Namespace, ask: Ask, deadline: float) -> Any:
        try:
            return await self._call(ask, deadline)
        except UnknownNamespace:
            await self._register(namespace, deadline)
        return await self._known(self._call(ask, deadline))

    async def _register(self, namespace: Namespace, deadline: float) -> None:
        async def register(lender: StoreLender) -> None:
            lender.register(namespace)

        await self._call(register, deadline)

    async def _known(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except UnknownNamespace as error:
            raise PeerGone(str(error), reason="failed") from error

    def _decoded(self, decode: Callable[[], T]) -> T:
        try:
            return decode()
        except Incompatible as error:
            wrong = PeerCorrupt(f"peer {self.peer.node[:8]}: {error}")
            self._end(wrong)
            raise wrong from error


async def _answer(work: Awaitable[Any], answering: asyncio.Future[Any]) -> None:
    try:
        result = await work
    except KVStoreError as error:
        answering.set_exception(error)
        answering.exception()  # its asker may have given up
    else:
        answering.set_result(result)


async def dial(
    network: Network, member: Member, source: str, now: Callable[[], float], deadline: float
) -> SimLink:
    """Return a link to a member. Raises PeerError."""
    left_s = min(deadline - now(), HELLO_S)
    try:
        async with asyncio.timeout(left_s):
            await network.get_through(source, member.node)
            server = network.servers.get(member.address)
            if server is None:
                raise PeerGone("the connection was refused")
            if server.node != member.node:
                raise PeerIncompatible("another node", reason="node", peer=server.member())
            await network.get_through(server.node, source)
    except TimeoutError:
        raise PeerSlow("it does not accept connections", reason="deadline") from None
    if server.dead:
        raise PeerGone("it has gone", reason="closed")
    return SimLink(network, server, source, now)
