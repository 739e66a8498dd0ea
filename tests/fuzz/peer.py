"""The wire between daemons under hostile bytes, in both directions.

What a borrower sends goes through the lender's own end of a control connection, over a lender in
memory; what a lender sends goes through the borrower's. Either may end the link, and do no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from kvstore.model.block import BlockKey, Group, Namespace, Part, Span
from kvstore.model.errors import Incompatible, KVStoreError
from kvstore.model.member import Member, NodeId
from kvstore.peer.base import HeadsAsk, HeadsReply, PeerMatch
from kvstore.peer.control import Calls
from kvstore.peer.identity import Ourselves
from kvstore.peer.lenders import Lenders
from kvstore.peer.lending import Lending
from kvstore.peer.messages import (
    KeysBody,
    MatchBody,
    NamespaceBody,
    PartsBody,
    Refusal,
    Ticket,
    decode_heads_reply,
    decode_hello,
    decode_match_reply,
    decode_parts,
    decode_read_head,
    decode_refusal,
    decode_ticket,
    encode,
    encode_read_head,
)
from kvstore.peer.onesided.messages import (
    GrantBody,
    HeldBody,
    MemoryBody,
    decode_grant_reply,
    decode_memory,
)
from kvstore.peer.onesided.ucx import parse_offer
from kvstore.peer.serving import Borrower
from kvstore.peer.wire import HEADER_NBYTES, Frame, Frames, Kind, parse_head
from kvstore.testing.lender import MemoryLender

KEYS = [BlockKey(bytes([i]) * 32) for i in range(1, 5)]
PACKED = b"".join(KEYS)
SPACE = Namespace(2, (Group("full", 5000),), (("model", "fuzz"),))
SPANS = (Span(Part(0, 0), 0, 4),)
THERE = Member(NodeId("a" * 32), "1" * 16, "10.0.0.1:7702", features=("ucx",))
HERE = Member(NodeId("b" * 32), "2" * 16, "10.0.0.2:7702", zone="rack-1", engines=("e:8000",))
ASKED = HeadsAsk("1" * 16, level=1, since=3)
FAILED = "this daemon has failed"  # what a peer is told of an exception that nobody expected


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is written at once."""


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run, and raise what the event loop was told of."""
    failed: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        await work
        await _turns()

    asyncio.run(watched())
    assert not failed, failed


async def _turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def mended(data: bytes) -> bytes:
    """Return bytes with the frames that are in them, each with the checksum that it should have:
    else nothing behind the checksum would ever be reached."""
    frames, at = b"", 0
    while at + HEADER_NBYTES <= len(data):
        try:
            nbytes, number, kind, timeout_s = parse_head(data[at:])
        except Incompatible:
            break
        begin, at = at + HEADER_NBYTES, at + HEADER_NBYTES + nbytes
        frames += Frame(kind, number, data[begin:at], timeout_s).encode()
    return frames + data[at:]


class _Registered:
    """A mover to which all memory is registered, without the thread of a real one."""

    version = 1

    def holds(self, view: memoryview) -> bool:
        return True

    async def offer(self) -> tuple[int, bytes]:
        return self.version, b"offer"


def replies(data: bytes, *, greeted: bool = True) -> list[Frame]:
    """Return what is answered to a borrower's bytes, in the order it is. greeted: after its HELLO,
    whose answer is left out."""
    written = bytearray()

    async def serve() -> None:
        lender = MemoryLender()
        lender.register(SPACE)
        for key in KEYS:
            lender.put(SPACE, key, bytes(10))
        lenders = Lenders.only(lender)
        ourselves = Ourselves("fuzz", lambda: THERE)
        lending = Lending(lenders, lambda: "1" * 16, serve_reads=1, refused=str)
        movers: dict[str, Any] = {"ucx": _Registered()}
        peer = Borrower(
            ourselves, lenders, lending, movers=movers, on_lost=lambda _: None, refused=str
        )
        transport = _Transport()
        peer.link.connection_made(transport)
        if greeted:
            peer.link.data_received(Frame(Kind.HELLO, 1, _hello(HERE)).encode())
            del transport.written[:]
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            if not transport.closed:
                peer.link.data_received(piece)
        await _turns()
        peer.link.connection_lost(None)
        await _turns()
        lending.close()
        assert not lending.reads, "a grant outlives its link"
        written.extend(transport.written)

    _run(serve())
    return Frames().feed(bytes(written))


def requests(data: bytes) -> None:
    """What a borrower sends. The first byte says whether it has said HELLO."""
    for body in {data[1:], mended(data[1:])}:
        for frame in replies(body, greeted=data[:1] != b"\0"):
            assert frame.kind in (Kind.REPLY, Kind.ERROR)
            if frame.kind == Kind.ERROR:
                assert decode_refusal(frame.body).message != FAILED, "a handler has raised"
    try:
        decode_parts(data)
    except KVStoreError:
        pass


def answers(data: bytes) -> None:
    """What a lender sends: frames, and the bodies of each kind of answer."""

    async def ask(sent: bytes) -> None:
        calls = Calls("a peer")
        transport = _Transport()
        calls.link.connection_made(transport)
        asked = [
            asyncio.create_task(calls.call(kind, b"", 60.0)) for kind in (Kind.HELLO, Kind.PING)
        ]
        await asyncio.sleep(0)
        for piece in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
            if not transport.closed:
                calls.link.data_received(piece)
        calls.link.connection_lost(None)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, bytes | KVStoreError) for each in found)

    for sent in {data, mended(data)}:
        _run(ask(sent))
    for decode in (
        decode_hello,
        decode_ticket,
        decode_refusal,
        lambda body: decode_match_reply(body, keys=4),
        lambda body: decode_heads_reply(body, ask=ASKED),
        lambda body: decode_heads_reply(body, ask=HeadsAsk(level=1)),
        lambda body: decode_read_head(body, records=2),
        lambda body: decode_grant_reply(body, records=2),
        decode_memory,
        parse_offer,
    ):
        for body in (data, data[HEADER_NBYTES:]):
            try:
                decode(body)
            except KVStoreError:
                continue


def _hello(member: Member) -> bytes:
    return Ourselves("fuzz", lambda: member).hello()


def _asked(*bodies: tuple[Kind, bytes]) -> bytes:
    return b"\1" + b"".join(
        Frame(kind, number, body, 1.0).encode() for number, (kind, body) in enumerate(bodies, 2)
    )


def _answered(*bodies: bytes) -> bytes:
    frames = (Frame(Kind.REPLY, number, body) for number, body in enumerate(bodies, 1))
    return b"".join(frame.encode() for frame in frames)


_PARTS = encode(PartsBody(namespace=SPACE.id, keys=PACKED, spans=SPANS))
_KEYS = encode(KeysBody(namespace=SPACE.id, keys=PACKED))
REQUESTS = [
    b"\0" + Frame(Kind.HELLO, 1, _hello(HERE)).encode(),
    _asked((Kind.NAMESPACE, encode(NamespaceBody(spec=SPACE.to_json(), name="fuzz")))),
    _asked((Kind.MATCH, encode(MatchBody(namespace=SPACE.id, keys=PACKED, skip=1)))),
    _asked((Kind.ARRIVAL, _PARTS), (Kind.READ, _PARTS), (Kind.PING, b""), (Kind.CANCEL, b"")),
    _asked((Kind.HEADS, encode(HeadsAsk())), (Kind.HEADS, encode(ASKED)), (Kind.BULK, b"\x80")),
    _asked(
        (Kind.GRANT, encode(GrantBody(link="ucx", parts=_PARTS))),
        (Kind.HELD, encode(HeldBody(grant=1))),
        (Kind.MEMORY, encode(MemoryBody(link="ucx"))),
    ),
    _asked((Kind.CORRUPT, _KEYS), (Kind.DELETE, encode(KeysBody(namespace=SPACE.id)))),
]
_CHUNK = HeadsReply("1" * 16, 1, 9, snapshot=True, cursor=1 << 60, heads=bytes(range(16)))
_CHANGES = replace(_CHUNK, since=5, snapshot=False, cursor=0, came=b"\0\1")
ANSWERS = [
    _answered(_hello(THERE), b""),
    _answered(encode(PeerMatch(3, 2))),
    _answered(encode(_CHUNK)),
    _answered(encode(_CHANGES)),
    _answered(encode(Ticket(token=b"t" * 32, send_key=b"s" * 16, receive_key=b"r" * 16))),
    _answered(encode_read_head("1" * 16, [5000, 0], [1, 0])),
    Frame(Kind.ERROR, 2, encode(Refusal(reason="busy", message="why"))).encode(),
]
