"""A scripted peer: it speaks the protocol by its frames and messages, in a thread of its own."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

from kvstore.model.checksum import checksum
from kvstore.model.member import Member, NodeId
from kvstore.peer.base import HeadsAsk, HeadsReply, PeerMatch
from kvstore.peer.messages import (
    MAGIC,
    Hello,
    Refusal,
    Ticket,
    decode_heads_ask,
    decode_match,
    decode_parts,
    encode,
    encode_read_head,
)
from kvstore.peer.wire import BULK_MAGIC, HELD, OPENING, TOKEN_NBYTES, Frame, Frames, Kind
from tests.faults.records import Records

FLEET = "default"
CHUNK_NBYTES = 64 << 10


class Peer:
    """An honest one: it has every prefix that it is asked for.

    seen: what the borrower has to show of it, as a pattern. full: whether what it lends is right.
    """

    seen: ClassVar[str] = "read"
    full: ClassVar[bool] = True
    protocol = (1, 1)
    fleet = FLEET

    def __init__(self, records: Records) -> None:
        self.records = records
        self.node = NodeId(secrets.token_hex(16))
        self.instance = secrets.token_hex(8)
        self.asked: Counter[int] = Counter()  # frames, by kind
        self.bulks = 0
        self.port = 0

    @property
    def name(self) -> str:
        return type(self).__name__

    def reply(self, frame: Frame, body: bytes = b"") -> bytes:
        return Frame(Kind.REPLY, frame.id, body).encode()

    def refusal(self, frame: Frame, reason: str) -> bytes:
        return Frame(Kind.ERROR, frame.id, encode(Refusal(reason=reason))).encode()

    # ---- control ---------------------------------------------------------------------------------

    def control(self, frame: Frame) -> bytes:
        """Return what is sent for a frame; b"": nothing."""
        answers = {
            Kind.HELLO: self.hello,
            Kind.PING: self.ping,
            Kind.NAMESPACE: self.reply,
            Kind.MATCH: self.match,
            Kind.BULK: self.ticket,
            Kind.HEADS: self.heads,
            Kind.CORRUPT: self.reply,
            Kind.DELETE: self.reply,
        }
        answer = answers.get(Kind(frame.kind))
        return answer(frame) if answer is not None else b""

    def hello(self, frame: Frame) -> bytes:
        address = f"127.0.0.1:{self.port}"
        member = Member(self.node, self.instance, address, protocol=self.protocol)
        return self.reply(frame, encode(Hello(magic=MAGIC, fleet=self.fleet, member=member)))

    def ping(self, frame: Frame) -> bytes:
        return self.hello(frame)

    def match(self, frame: Frame) -> bytes:
        keys, _ = decode_match(frame.body)
        return self.reply(frame, encode(self.matched(len(keys.keys))))

    def matched(self, keys: int) -> PeerMatch:
        return PeerMatch(keys, keys)

    def ticket(self, frame: Frame) -> bytes:
        return self.reply(frame, encode(Ticket(token=secrets.token_bytes(TOKEN_NBYTES))))

    def heads(self, frame: Frame) -> bytes:
        ask = decode_heads_ask(frame.body)
        return b"" if ask.since >= 0 else self.reply(frame, encode(self.snapshot(ask)))

    def snapshot(self, ask: HeadsAsk) -> HeadsReply:
        return HeadsReply(self.instance, ask.level, 0, snapshot=True)

    # ---- bulk ------------------------------------------------------------------------------------

    def opened(self) -> bytes:
        """Return what is sent before the first READ."""
        return b""

    async def lend(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        """Answer one READ. Raises ConnectionError to end the connection."""
        keys, body = decode_parts(frame.body)
        records = self.records.make(keys.keys, body.spans)
        writer.write(self.head(frame, records) + self.body(records) + self.held)

    def head(self, frame: Frame, records: Sequence[bytes]) -> bytes:
        sums = [checksum(each) for each in records]
        head = encode_read_head(self.instance, [len(each) for each in records], sums)
        return self.reply(frame, head)

    def body(self, records: Sequence[bytes]) -> bytes:
        return b"".join(records)

    held = HELD

    # ---- connections -----------------------------------------------------------------------------

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # CancelledError: all end.
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            start = await reader.readexactly(len(BULK_MAGIC))
            if start == BULK_MAGIC:
                await self._bulk(reader, writer)
            else:
                await self._control(start, reader, writer)
        writer.transport.abort()

    async def _control(
        self, data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        frames = Frames()
        while data:
            for frame in frames.feed(data):
                self.asked[frame.kind] += 1
                writer.write(self.control(frame))
            data = await reader.read(CHUNK_NBYTES)

    async def _bulk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bulks += 1
        await reader.readexactly(OPENING.size - len(BULK_MAGIC))
        writer.write(self.opened())
        frames = Frames()
        while data := await reader.read(CHUNK_NBYTES):
            for frame in frames.feed(data):
                self.asked[frame.kind] += 1
                await self.lend(frame, writer)
                await writer.drain()


@contextmanager
def serving(peers: Sequence[Peer]) -> Iterator[None]:
    """Let peers answer on ports of loopback, in a thread of their own."""
    ready, done = threading.Event(), threading.Event()

    async def run() -> None:
        servers = []
        for peer in peers:
            server = await asyncio.start_server(peer.connected, "127.0.0.1", 0)
            peer.port = server.sockets[0].getsockname()[1]
            servers.append(server)
        ready.set()
        await asyncio.to_thread(done.wait)
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    if not ready.wait(20):
        raise RuntimeError("the scripted peers did not start")
    try:
        yield
    finally:
        done.set()
        thread.join(20)
