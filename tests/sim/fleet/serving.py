"""The lender's end of the simulated links: requests answered, records sent under a lease.

It keeps the rules of the TCP server: it ends a request whose borrower has given up, lends to at
most so many at once, and holds a lease until the last byte was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any

from kvstore.model.errors import KVStoreError
from kvstore.model.member import Member
from kvstore.peer.base import (
    LentRecord,
    Loan,
    PeerBusy,
    PeerGone,
    PeerSlow,
)
from kvstore.peer.bulk import SILENCE_S
from kvstore.peer.control import error_of, refusal_of
from kvstore.peer.messages import (
    encode_read_head,
)
from kvstore.store.lender import StoreLender
from tests.sim.fleet.network import STALL_S, Network

if TYPE_CHECKING:
    from tests.sim.fleet.link import SimLink

READS_MAX = 8
REQUEST_S_MAX = 120.0

Ask = Callable[[StoreLender], Awaitable[Any]]
ReadFile = Callable[[str, int, int], "bytes | None"]


class SimServer:
    """The peer port of one life of a host. reads, loans: under way. silent: its machine is off, so
    that nobody is told that it is gone."""

    def __init__(
        self,
        network: Network,
        member: Callable[[], Member],
        lender: StoreLender,
        context: Context,
        read_file: ReadFile,
    ) -> None:
        """context: of the tasks that answer. read_file: returns bytes of a lent place."""
        self.network = network
        self.member = member
        self.lender = lender
        self.node = member().node
        self.address = member().address
        self.instance = member().instance
        self.dead = self.silent = self.draining = False
        self.reads = self.loans = self.sent_records = 0
        self._read_file = read_file
        self._context = context
        self._tasks: dict[asyncio.Task[None], None] = {}
        network.servers[self.address] = self

    def die(self, *, silent: bool) -> None:
        """End, with or without a word to those who have links."""
        self.dead, self.silent = True, silent
        if self.network.servers.get(self.address) is self:
            del self.network.servers[self.address]
        for task in list(self._tasks):
            task.cancel()
        if not silent:
            for link in sorted(self.network.links, key=lambda link: link.number):
                if link.server is self:
                    link.hang_up()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Answer a request, until it is answered or this host ends."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, context=self._context.copy())
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]

    async def answered(self, ask: Ask, timeout_s: float) -> Any:
        """Return what this host answers. Raises KVStoreError, as it is told to a peer."""
        try:
            async with asyncio.timeout(min(timeout_s + 1.0, REQUEST_S_MAX)):
                return await ask(self.lender)
        except KVStoreError as error:
            raise error_of(refusal_of(error), f"peer {self.node[:8]}") from error
        except TimeoutError:
            raise PeerGone("this took too long", reason="failed") from None
        except Exception as error:
            self.network.note(error)
            raise PeerGone("this daemon has failed", reason="failed") from error

    async def serve_read(self, stream: Stream, ask: Ask, deadline: float) -> None:
        """Answer one READ."""
        try:
            if self.draining:
                raise PeerBusy("this daemon is about to stop", reason="draining")
            if self.reads >= READS_MAX:
                raise PeerBusy(f"{READS_MAX} reads of peers are under way")
            self.reads += 1
            try:
                await self._lend(stream, await ask(self.lender), deadline)
            finally:
                self.reads -= 1
        except KVStoreError as error:
            await stream.refuse(error_of(refusal_of(error), f"peer {self.node[:8]}"))
        except Exception as error:
            self.network.note(error)
            stream.end(PeerGone("this daemon has failed", reason="failed"))

    async def _lend(self, stream: Stream, loan: Loan, deadline: float) -> None:
        """Send what is lent; the lease ends with it, whatever happens."""
        self.loans += 1
        held = False
        try:
            records = loan.records
            sizes = [record.nbytes if record else 0 for record in records]
            sums = [record.checksum if record else 0 for record in records]
            head = encode_read_head(self.instance, sizes, sums)
            await stream.send(("head", head), deadline)
            for at, record in enumerate(records):
                if record is not None:
                    await self._send(stream, at, record, deadline)
            held = loan.held()
        except (PeerGone, PeerSlow):
            return
        finally:
            loan.release()
            self.loans -= 1
        try:
            await stream.send(("held", held), deadline)
        except (PeerGone, PeerSlow):
            return

    async def _send(self, stream: Stream, at: int, record: LentRecord, deadline: float) -> None:
        half = record.nbytes // 2
        for begin, end in ((0, half), (half, record.nbytes)):
            data = self._bytes_of(record, begin, end)
            if data is None or len(data) < end - begin:
                stream.end(PeerGone("a file could not be read", reason="failed"))
                raise PeerGone("a file could not be read", reason="failed")
            await stream.send(("piece", (at, begin, data)), deadline)
        self.sent_records += 1

    def _bytes_of(self, record: LentRecord, begin: int, end: int) -> bytes | None:
        if record.view is not None:
            return bytes(record.view[begin:end])
        assert record.place is not None
        return self._read_file(record.place.path, record.place.offset + begin, end - begin)


class Stream:
    """One bulk connection, for one READ. Its pieces arrive in order, or not at all."""

    def __init__(self, link: SimLink) -> None:
        self.over: PeerGone | PeerSlow | None = None
        self._link = link
        self._network = link.network
        self._arrived: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def send(self, piece: tuple[str, Any], deadline: float) -> None:
        """Raises PeerSlow or PeerGone, once the stream is over."""
        loop = asyncio.get_running_loop()
        server, source = self._link.server, self._link.server.node
        stalled_at = loop.time()
        if self._network.is_cut():
            self.end(PeerGone("the connection was cut"))
        while self.over is None:
            if await self._network.travel(source, self._link.source, piece=True):
                break
            if loop.time() - stalled_at > SILENCE_S or loop.time() > deadline:
                self.over = PeerSlow("the borrower does not read")
            await asyncio.sleep(STALL_S)
        if self.over is None and (server.dead or not self._link.open):
            self.over = PeerGone("an end of it is gone", reason="closed")
        if self.over is not None:
            raise self.over
        kind, content = piece
        if kind == "piece":
            at, begin, data = content
            content = (at, begin, self._network.flip(data))
        self._arrived.put_nowait((kind, content))

    async def refuse(self, error: KVStoreError) -> None:
        if await self._network.travel(self._link.server.node, self._link.source, piece=True):
            self._arrived.put_nowait(("error", error))

    def end(self, error: PeerGone | PeerSlow) -> None:
        """End it: a reader that still waits is told, if its machine can be reached."""
        if self.over is None:
            self.over = error
            if self._network.passes(self._link.server.node, self._link.source):
                self._arrived.put_nowait(("error", error))

    async def receive(self, deadline: float) -> tuple[str, Any]:
        """Return the next piece. Raises what ended it, PeerSlow after a silence."""
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(min(left_s, SILENCE_S)):
                kind, content = await self._arrived.get()
        except TimeoutError:
            reason = "deadline" if left_s < SILENCE_S else "silent"
            raise PeerSlow("nothing came in time", reason=reason) from None
        if kind == "error":
            raise content
        return kind, content
