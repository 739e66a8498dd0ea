"""Whose blocks a peer is lent: those of the tenant that it names, and no other's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore.model.tenant import NO_TENANT_ID, tenant_id
from kvstore.peer import messages
from kvstore.peer.base import HeadsAsk, PeerBusy, PeerIncompatible
from kvstore.peer.lenders import Lenders
from kvstore.peer.tcp import TcpLink
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import full_span, soon, until
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from tests.peer.fleet import BORROWER, LENDER, Served, ourselves, served

NBYTES = 100_000
SPEC = sample_namespace("tenants", NBYTES)
ACME, BETA, NOBODY = (tenant_id(name) for name in ("acme", "beta", "nobody"))
SPEAKS = (1, 2)


async def with_tenants(
    test: Callable[[dict[bytes, MemoryLender], Served, TcpLink], Awaitable[None]],
    *,
    protocol: tuple[int, int] = SPEAKS,
) -> None:
    """Run a test with a daemon that has acme and beta, and a link to it."""
    lenders = {ACME: MemoryLender(), BETA: MemoryLender()}
    me = ourselves(LENDER, protocol=protocol)
    async with asyncio.timeout(30), served(me, Lenders(lenders), serve_reads=4) as found:
        link = await found.dial(ourselves(BORROWER, protocol=SPEAKS))
        await test(dict(lenders), found, link)
        await link.close()


async def everything(link: TcpLink) -> list[str]:
    """Ask a link for all that it can be asked for; return the reasons of what was refused."""
    keys = sample_keys("tenants", 2)
    asked = [
        link.match(SPEC, keys, deadline=soon()),
        link.read(SPEC, keys, full_span(2), deadline=soon()),
        link.heads(HeadsAsk(), deadline=soon()),
        link.corrupt(SPEC.id, keys, deadline=soon()),
        link.delete(SPEC.id, keys, deadline=soon()),
        link.delete(None, None, deadline=soon()),
    ]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, PeerIncompatible) for each in ended), ended
    return [each.reason for each in ended if isinstance(each, PeerIncompatible)]


def test_a_peer_gets_what_the_tenant_that_it_names_has() -> None:
    async def test(lenders: dict[bytes, MemoryLender], found: Served, link: TcpLink) -> None:
        keys = sample_keys("tenants", 3)
        for key in keys:
            lenders[ACME].put(SPEC, key, sample_record(key, NBYTES))
        acme, beta = link.of(ACME), link.of(BETA)
        assert (await acme.match(SPEC, keys, deadline=soon())).hit_blocks == 3
        assert (await beta.match(SPEC, keys, deadline=soon())).hit_blocks == 0
        incoming = await beta.read(SPEC, keys, full_span(3), deadline=soon())
        assert list(incoming.sizes) == [0, 0, 0]
        await incoming.close()
        incoming = await acme.read(SPEC, keys, full_span(3), deadline=soon())
        targets = [memoryview(bytearray(NBYTES)) for _ in keys]
        await incoming.fill(targets)
        assert targets == [sample_record(key, NBYTES) for key in keys]
        heads = [(await each.heads(HeadsAsk(), deadline=soon())).heads for each in (acme, beta)]
        assert (len(heads[0]), heads[1]) == (3 * 8, b"")
        await beta.delete(SPEC.id, keys, deadline=soon())
        assert (lenders[ACME].deleted, len(lenders[BETA].deleted)) == ([], 1)
        await until(lambda: found.server.sent_nbytes[BORROWER, ACME] == 3 * NBYTES)

    asyncio.run(with_tenants(test))


def test_a_tenant_that_is_not_there_is_refused_whatever_is_asked() -> None:
    async def test(lenders: dict[bytes, MemoryLender], found: Served, link: TcpLink) -> None:
        for unknown in (NOBODY, NO_TENANT_ID):  # a daemon of several has none without a name
            before = found.refused["tenant"]
            assert await everything(link.of(unknown)) == ["tenant"] * 6
            assert found.refused["tenant"] == before + 6
        keys = sample_keys("tenants", 1)
        assert (await link.of(ACME).match(SPEC, keys, deadline=soon())).hit_blocks == 0

    asyncio.run(with_tenants(test))


def test_a_peer_that_does_not_look_at_tenants_is_not_asked_for_one() -> None:
    """It would answer with the blocks of whoever it serves."""

    async def test(lenders: dict[bytes, MemoryLender], found: Served, link: TcpLink) -> None:
        assert await everything(link.of(ACME)) == ["tenant"] * 6
        assert not found.refused

    asyncio.run(with_tenants(test, protocol=(1, 1)))


def test_no_tenant_has_more_than_half_of_the_reads() -> None:
    async def test(lenders: dict[bytes, MemoryLender], found: Served, link: TcpLink) -> None:
        (key,) = sample_keys("tenants", 1)
        large = sample_namespace("large", 40 << 20)  # more than sockets buffer
        for lender in lenders.values():
            lender.put(large, key, bytes(40 << 20))
        acme, beta = link.of(ACME), link.of(BETA)

        def read(each: TcpLink) -> Awaitable[object]:
            return each.read(large, [key], full_span(1), deadline=soon())

        held = [await read(acme), await read(acme)]  # answers that nobody receives yet
        with pytest.raises(PeerBusy):
            await read(acme)
        assert (await acme.match(large, [key], deadline=soon())).busy
        assert not (await beta.match(large, [key], deadline=soon())).busy
        held.append(await read(beta))
        for incoming in held:
            await incoming.close()  # type: ignore[attr-defined]

    asyncio.run(with_tenants(test))


def test_an_id_of_another_length_is_no_tenant() -> None:
    body = messages.MatchBody(tenant=b"acme", namespace=SPEC.id, keys=b"")
    with pytest.raises(InvalidRequest, match="a tenant's id of 4 bytes"):
        messages.tenant_of(body.tenant)
