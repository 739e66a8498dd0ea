"""Who is let in, who is not, and what both sides are told."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.model.member import NodeId
from kvstore.peer import server as server_module
from kvstore.peer.base import PeerError, PeerGone, PeerIncompatible
from kvstore.peer.identity import Ourselves
from kvstore.peer.trust import Trust
from kvstore.peer.wire import BULK_MAGIC, Frame, Kind
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import until
from tests.peer.fleet import BORROWER, LENDER, Certificates, Served, ourselves, served

OTHER = NodeId("c" * 32)


def run(there: Ourselves, test: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), served(there, MemoryLender()) as found:
            await test(found)

    asyncio.run(main())


async def ended(reader: asyncio.StreamReader) -> bool:
    """Say whether a connection ends without an answer."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def refused(there: Ourselves, here: Ourselves, reason: str, counted: str = "") -> None:
    """See that a peer is refused with a word, which the refusing side counts."""

    async def test(found: Served) -> None:
        with pytest.raises(PeerIncompatible) as caught:
            await found.dial(here)
        assert caught.value.reason == reason, caught.value
        await until(lambda: not counted or found.refused[counted] == 1)
        await until(lambda: found.server.connections == 0)

    run(there, test)


def test_a_peer_of_another_fleet_is_refused() -> None:
    refused(ourselves(LENDER), ourselves(BORROWER, fleet="others"), "fleet", "fleet")


def test_a_second_daemon_with_our_node_id_is_refused() -> None:
    refused(ourselves(LENDER), ourselves(LENDER, instance="9" * 16), "node", "node")


def test_a_daemon_does_not_speak_with_itself() -> None:
    refused(ourselves(LENDER), ourselves(LENDER), "self", "self")


def test_without_a_common_version_there_is_no_link() -> None:
    newer = ourselves(BORROWER, protocol=(2, 3))
    refused(ourselves(LENDER), newer, "protocol", "protocol")


def test_the_highest_common_version_is_spoken() -> None:
    async def test(found: Served) -> None:
        link = await found.dial(ourselves(BORROWER, protocol=(1, 7)))
        assert (link.peer.node, link.peer.instance) == (LENDER, "1" * 16)
        await link.close()

    run(ourselves(LENDER, protocol=(1, 2)), test)


def test_another_node_than_the_expected_one_is_no_peer() -> None:
    async def test(found: Served) -> None:
        with pytest.raises(PeerIncompatible) as caught:
            await found.dial(ourselves(BORROWER), expected=OTHER)
        assert caught.value.reason == "node"
        link = await found.dial(ourselves(BORROWER), expected=None)
        await link.close()

    run(ourselves(LENDER), test)


# ---- certificates --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def lender_trust(fleet: Certificates) -> Trust:
    return fleet.trust(LENDER)


def test_a_certificate_of_another_authority_is_refused(lender_trust: Trust, tmp_path: Path) -> None:
    foreign = Certificates(tmp_path).trust(BORROWER)
    there = ourselves(LENDER, trust=lender_trust)
    refused(there, ourselves(BORROWER, trust=foreign), "certificate")


def test_a_certificate_of_another_authority_is_refused_by_the_lender(
    lender_trust: Trust, fleet: Certificates, tmp_path: Path
) -> None:
    """The borrower believes the lender's authority, but has its own certificate from elsewhere."""
    foreign = Certificates(tmp_path / "foreign")
    foreign.trust(BORROWER)
    mixed = Trust(tmp_path / "foreign/bbbb.pem", tmp_path / "foreign/bbbb.key", fleet.authority)
    there = ourselves(LENDER, trust=lender_trust)
    refused(there, ourselves(BORROWER, trust=mixed), "certificate", "certificate")


@pytest.mark.parametrize(
    "names", [("*.others.kvstore",), (f"{OTHER}.tests.kvstore",), ("tests.kvstore", "localhost")]
)
def test_a_certificate_with_another_name_is_refused(
    lender_trust: Trust, fleet: Certificates, names: tuple[str, ...]
) -> None:
    here = ourselves(BORROWER, trust=fleet.trust(BORROWER, *names))
    refused(ourselves(LENDER, trust=lender_trust), here, "certificate", "certificate")


def test_a_lender_with_the_name_of_another_node_is_no_peer(
    lender_trust: Trust, fleet: Certificates
) -> None:
    """The one that holds a certificate of node a says that it is node c."""
    there = ourselves(OTHER, trust=lender_trust)

    async def test(found: Served) -> None:
        with pytest.raises(PeerIncompatible) as caught:
            await found.dial(ourselves(BORROWER, trust=fleet.trust(BORROWER)), expected=OTHER)
        assert caught.value.reason == "certificate"

    run(there, test)


def test_an_expired_certificate_is_refused(lender_trust: Trust, fleet: Certificates) -> None:
    expired = fleet.trust(OTHER, expired=True)
    there = ourselves(LENDER, trust=lender_trust)
    refused(there, ourselves(OTHER, trust=expired), "certificate", "certificate")
    fine = fleet.trust(BORROWER)
    refused(ourselves(OTHER, trust=expired), ourselves(BORROWER, trust=fine), "certificate")


def test_with_and_without_tls_do_not_mix(lender_trust: Trust) -> None:
    refused(ourselves(LENDER, trust=lender_trust), ourselves(BORROWER), "tls", "tls")
    refused(ourselves(LENDER), ourselves(BORROWER, trust=lender_trust), "tls", "tls")


def test_records_are_sealed_if_either_side_says_so(fleet: Certificates) -> None:
    for there_sealed, here_sealed in ((True, False), (False, True)):
        there = ourselves(LENDER, trust=fleet.trust(LENDER), sealed=there_sealed)
        here = ourselves(BORROWER, trust=fleet.trust(BORROWER), sealed=here_sealed)

        async def test(found: Served, here: Ourselves = here) -> None:
            link = await found.dial(here)
            connections, deadline = link.reads.connections, time.monotonic() + 5
            turn = await connections.take(deadline)
            await connections.ask(turn, Frame(Kind.READ, 1, b"", 1.0), deadline)
            assert turn.bulk.sealer is not None
            connections.give(turn, good=False)
            await link.close()

        run(there, test)


def test_new_certificates_are_used_without_a_restart(fleet: Certificates) -> None:
    trust = fleet.trust(LENDER, "*.others.kvstore")
    here = ourselves(BORROWER, trust=fleet.trust(BORROWER))

    async def test(found: Served) -> None:
        with pytest.raises(PeerIncompatible):
            await found.dial(here)
        fleet.trust(LENDER)  # into the same files
        link = await found.dial(here)
        await link.close()

    run(ourselves(LENDER, trust=trust), test)


# ---- connections that say nothing, or nonsense ---------------------------------------------------


def test_who_does_not_say_hello_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_S", 0.1)

    async def test(found: Served) -> None:
        for start in (b"", b"K", BULK_MAGIC + b"short", Frame(Kind.HELLO, 1).encode()[:9]):
            reader, writer = await asyncio.open_connection("127.0.0.1", found.server.port)
            writer.write(start)
            assert await ended(reader)
            writer.close()
        await until(lambda: found.refused["hello"] == 4 and found.server.connections == 0)

    run(ourselves(LENDER), test)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 64,
        Frame(Kind.PING, 1).encode(),
        Frame(Kind.HELLO, 1, b"\xc1").encode(),
        BULK_MAGIC + b"t" * 32,
    ],
)
def test_nonsense_ends_a_connection(data: bytes) -> None:
    async def test(found: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", found.server.port)
        writer.write(data)
        assert await ended(reader)
        writer.close()
        await until(lambda: found.refused.total() and found.server.connections == 0)

    run(ourselves(LENDER), test)


def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "OPENINGS_OF_ONE_MAX", 3)

    async def test(found: Served) -> None:
        silent = [socket.create_connection(("127.0.0.1", found.server.port)) for _ in range(3)]
        await until(lambda: found.server.connections == 3)
        with pytest.raises(PeerGone):
            await found.dial(ourselves(BORROWER))
        assert found.refused["connections"] == 1
        for each in silent:
            each.close()
        await until(lambda: found.server.connections == 0)
        link = await found.dial(ourselves(BORROWER))
        await link.close()

    run(ourselves(LENDER), test)


def test_connections_that_come_all_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "OPENINGS_OF_ONE_MAX", 3)

    async def test(found: Served) -> None:
        silent = [socket.create_connection(("127.0.0.1", found.server.port)) for _ in range(10)]
        await until(lambda: found.server.connections)
        assert (found.server.connections, found.refused["connections"]) == (3, 7)
        for each in silent:
            each.close()
        await until(lambda: found.server.connections == 0)

    run(ourselves(LENDER), test)


def test_a_node_that_connects_again_and_again_has_few_links() -> None:
    async def test(found: Served) -> None:
        links = [await found.dial(ourselves(BORROWER)) for _ in range(4)]
        await until(lambda: sum(link.open for link in links) == server_module.LINKS_OF_ONE_MAX)
        assert links[-1].open
        for link in links:
            await link.close()

    run(ourselves(LENDER), test)


def test_a_port_that_is_taken_is_named() -> None:
    async def test(found: Served) -> None:
        with pytest.raises(ConfigError, match=r"cluster\.listen=127\.0\.0\.1:\d+ cannot be had"):
            async with served(ourselves(BORROWER), MemoryLender()) as second:
                await second.server.start("127.0.0.1", found.server.port)

    run(ourselves(LENDER), test)


def test_nobody_there_is_told_at_once() -> None:
    async def test(found: Served) -> None:
        port = found.server.port
        await found.server.close()
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            await found.dial(ourselves(BORROWER), port=port)
        assert caught.value.reason == "connection"
        assert time.monotonic() - began < 2.0

    run(ourselves(LENDER), test)
