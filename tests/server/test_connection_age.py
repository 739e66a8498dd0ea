"""A connection over TLS ends at its age, and its client shows its credentials on a new one: no call
notices, nor does a stream that lasts longer."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import AsyncClient, Client
from kvstore.model.tenant import Role
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.server.test_credentials import Issuer
from tests.tls import Authority

AGE_MS = 300
RENEWED = 4  # connections that end while calls and streams are under way
SPACE = sample_namespace("age")
KEYS = sample_keys("age", 8)
RECORDS = sample_records(KEYS)
SHORT = (
    f"from kvstore.server import listeners; listeners.{{}} = {AGE_MS}\n"
    "from kvstore.cli.main import main; main(prog_name='kvstore')"
)


class ShortLived(Daemon):
    """A daemon whose connections over TLS end soon."""

    bound = "CONNECTION_AGE_MS"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", SHORT.format(self.bound), *arguments]


class Impatient(ShortLived):
    """A daemon whose connections over TCP end soon when nobody calls."""

    bound = "CONNECTION_IDLE_MS"


class Site:
    def __init__(self, directory: Path) -> None:
        authority, issuer = Authority(directory / "ours"), Issuer(directory)
        self.ca, server = authority.ca, authority.issue("server")
        self.token = directory / "token"
        self.token.write_text(issuer.issue(Role.OPERATOR))
        self.daemon = ShortLived(
            "server.listen=127.0.0.1:0",
            f"tls.cert={server.cert}",
            f"tls.key={server.key}",
            f"security.tokens={issuer.path}",
            file=False,
        )

    def told(self) -> dict[str, Any]:
        return {"tls_ca": self.ca, "token_file": self.token}


def connections(daemon: Daemon) -> set[int]:
    """Return the ports of those who are connected now."""
    found = set()
    lines = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    for line in (each for some in lines for each in some[1:]):
        _, local, remote, state, *_ = line.split()
        port, peer = (int(each.rpartition(":")[2], 16) for each in (local, remote))
        if port == daemon.port and state == "01":
            found.add(peer)
    return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    with site.daemon.start():
        yield site


def test_calls_and_streams_survive_the_renewal_of_their_connection(site: Site) -> None:
    seen: set[int] = set()
    renewed = threading.Event()

    def call_always() -> int:
        calls = 0
        with Client(site.daemon.address, **site.told()) as client:
            client.put(client.register(SPACE), KEYS, RECORDS)
            while not renewed.is_set():
                assert client.match(SPACE.id, KEYS).hit_blocks == len(KEYS)
                assert client.get(SPACE.id, KEYS) == RECORDS
                calls += 2
        return calls

    def ask_late() -> None:
        with Client(site.daemon.target) as engine:
            engine.register(SPACE)
            engine.acquire(SPACE.id, KEYS, request_id="late")

    async def watch() -> int:
        client = AsyncClient(site.daemon.address, **site.told())
        calling = asyncio.create_task(asyncio.to_thread(call_always))
        try:
            replies = client.admin.monitor()
            assert not (await anext(replies)).answered
            await asyncio.to_thread(until, lambda: _is_renewed(site, seen), 30)
            await asyncio.to_thread(ask_late)
            async with asyncio.timeout(10):
                while not await _tells(replies, "late"):
                    pass
        finally:
            renewed.set()
            calls = await calling
            await client.close()
        return calls

    assert asyncio.run(watch()) > 2 * RENEWED


def _is_renewed(site: Site, seen: set[int]) -> bool:
    seen |= connections(site.daemon)
    return len(seen) > 2 + RENEWED  # both clients have had one from the first on


async def _tells(replies: Any, request_id: str) -> bool:
    reply = await anext(replies)
    return any(each.outcome.request_id == request_id for each in reply.answered)


def test_a_connection_over_tcp_without_calls_ends_and_its_client_comes_again() -> None:
    with Impatient(file=False, tcp=True) as daemon, Client(daemon.start().address) as client:
        client.put(client.register(SPACE), KEYS, RECORDS)
        assert until(lambda: not connections(daemon)) >= AGE_MS / 1000 / 2
        assert client.get(SPACE.id, KEYS) == RECORDS
        daemon.stop()
