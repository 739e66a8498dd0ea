"""A bit that flips anywhere in a request costs the request: it never becomes another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvstore.model.block import Group, Namespace, Part, Span
from kvstore.peer.base import PeerError
from kvstore.peer.messages import KeysBody, PartsBody, encode
from kvstore.peer.tcp import TcpLink
from kvstore.peer.wire import Frame, Kind
from kvstore.testing.lender import MemoryLender
from kvstore.testing.relay import Relay, relayed
from kvstore.testing.samples import sample_keys
from tests.peer.fleet import BORROWER, LENDER, Served, ourselves, served

NBYTES = 100
ANSWER_S = 0.5  # to a request whose length was harmed: the rest of it never comes
SPACE = Namespace(16, (Group("full", NBYTES, shards=2),), (("model", "flips"),))
KEYS = sample_keys("flips", 2)
SPANS = (Span(Part(0, 0), 0, 2),)
WANTED = [bytes([at]) * NBYTES for at in range(2)]
OTHERS = [bytes([9 + at]) * NBYTES for at in range(2)]  # of the other shard


def flipping(
    kind: Kind, body: bytes, ask: Callable[[MemoryLender, TcpLink], Awaitable[None]]
) -> int:
    """Ask once for each byte of the request, with a bit of it flipped; return how often a request
    that was harmed was answered all the same."""

    async def main() -> int:
        lender = MemoryLender()
        lender.register(SPACE)
        for key, wanted, other in zip(KEYS, WANTED, OTHERS, strict=True):
            lender.put(SPACE, key, wanted, Part(0, 0))
            lender.put(SPACE, key, other, Part(0, 1))
        async with (
            asyncio.timeout(60),
            served(ourselves(LENDER), lender) as found,
            relayed(found.server.port) as relay,
        ):
            return await asked(lender, found, relay)

    async def asked(lender: MemoryLender, found: Served, relay: Relay) -> int:
        answered = 0
        link = await found.dial(ourselves(BORROWER), port=relay.port)
        for at in range(len(Frame(kind, 1, body, 5.0).encode())):
            if not link.open:
                link = await found.dial(ourselves(BORROWER), port=relay.port)
            relay.flip_ask = int(kind), at
            try:
                await ask(lender, link)
            except PeerError:
                continue
            assert relay.flip_ask is None, "nothing was harmed"
            answered += 1
        await link.close()
        return answered

    return asyncio.run(main())


def test_a_read_brings_what_was_asked_for() -> None:
    async def ask(lender: MemoryLender, link: TcpLink) -> None:
        incoming = await link.read(SPACE, KEYS, SPANS, deadline=time.monotonic() + ANSWER_S)
        targets = [memoryview(bytearray(nbytes)) for nbytes in incoming.sizes]
        await incoming.fill(targets)
        there = zip(targets, WANTED, strict=True)
        assert all(target == wanted for target, wanted in there if len(target))

    body = encode(PartsBody(namespace=SPACE.id, keys=b"".join(KEYS), spans=SPANS))
    assert flipping(Kind.READ, body, ask) == 0


def test_a_delete_that_was_confirmed_is_of_what_was_named() -> None:
    async def ask(lender: MemoryLender, link: TcpLink) -> None:
        lender.deleted.clear()
        await link.delete(SPACE.id, KEYS, deadline=time.monotonic() + ANSWER_S)
        assert lender.deleted == [(SPACE.id, KEYS)]

    body = encode(KeysBody(namespace=SPACE.id, keys=b"".join(KEYS)))
    assert flipping(Kind.DELETE, body, ask) == 0
