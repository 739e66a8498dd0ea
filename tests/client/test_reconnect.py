"""A client has one connection at most, whoever makes it, and finds its daemon after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstore import AsyncClient, Client, Group, InvalidRequest, Namespace, Unavailable
from kvstore.client.connection import Connection
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until

Opener = Callable[..., Awaitable[Connection]]
LARGE = Namespace(16, (Group("all", 20 << 20),), (("model", "large"),))


class Attempts:
    """Attempts to connect, each of which may be held up; those that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.made: list[Connection] = []
        self.begun = asyncio.Event()
        self.may_go = asyncio.Event()
        self.error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._open: Opener = Connection.open
        monkeypatch.setattr(Connection, "open", self.open)

    async def open(self, *args: Any, **options: Any) -> Connection:
        if asyncio.get_running_loop() is not self._loop:  # a client that another test left behind
            return await self._open(*args, **options)
        self.count += 1
        self.begun.set()
        await self.may_go.wait()
        if self.error is not None:
            raise self.error
        connection = await self._open(*args, **options)
        self.made.append(connection)
        return connection

    @property
    def linked(self) -> list[Connection]:
        """Connections whose links are open."""
        return [each for each in self.made if each.arena and each.arena._connection.fileno() >= 0]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(go())


async def available(client: AsyncClient) -> None:
    while not client.available:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)


def test_a_namespace_that_a_new_daemon_refuses_keeps_nobody_from_it() -> None:
    small, keys = sample_namespace("small"), sample_keys("refused", 1)
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        client.register(small)
        client.register(LARGE)
        daemon.kill()
        until(lambda: not client.available)
        daemon.start("dram.extent=16MiB")
        until(lambda: client.available)
        assert client.match(small.id, keys).hit_blocks == 0
        assert client.admin.stats()["sessions"] == 1
        with pytest.raises(InvalidRequest, match="extent"):
            client.match(LARGE.id, keys)
        assert client.available


def test_who_waits_for_an_attempt_that_fails_makes_none_of_its_own(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        attempts = Attempts(monkeypatch)
        attempts.error = Unavailable("no answer in time")
        client = AsyncClient(daemon.target)
        callers = [asyncio.create_task(client.connect()) for _ in range(5)]
        await attempts.begun.wait()
        attempts.may_go.set()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        assert [type(each) for each in outcomes] == [Unavailable] * 5
        assert attempts.count == 1
        attempts.error = None
        await available(client)
        await client.connect()
        assert len(attempts.made) == len(attempts.linked) == 1
        await client.close()
        assert not attempts.linked

    run(work)


@pytest.mark.parametrize("error", [OSError(24, "no file"), RuntimeError("can't start new thread")])
def test_a_moment_without_descriptors_or_threads_does_not_end_the_attempts(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def work() -> None:
        attempts = Attempts(monkeypatch)
        attempts.may_go.set()
        client = AsyncClient(daemon.target)
        await client.connect()
        attempts.error = error
        client._caller.lost(attempts.made[0])
        while attempts.count < 3:  # noqa: ASYNC110 - the first one, and two that failed
            await asyncio.sleep(0.01)
        attempts.error = None
        await available(client)
        await client.close()

    run(work)


def test_a_probe_makes_no_connection_beside_one(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has ended, and while the next one is opened, the old link is lost."""

    async def work() -> None:
        attempts = Attempts(monkeypatch)
        attempts.may_go.set()
        client = AsyncClient(daemon.target)
        await client.connect()
        first = attempts.made[0]
        attempts.may_go.clear()
        attempts.begun.clear()
        client._caller.ended(first)
        await attempts.begun.wait()
        client._caller.lost(first)
        probe = client._caller._recovering
        assert probe is not None
        await asyncio.sleep(0.3)  # longer than the probe waits before it asks
        attempts.may_go.set()
        await probe
        await client.connect()
        assert attempts.count == 2
        await client.close()
        assert not attempts.linked

    run(work)


def test_what_is_made_for_a_client_that_was_closed_is_closed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        attempts = Attempts(monkeypatch)
        client = AsyncClient(daemon.target)
        connecting = asyncio.create_task(client.connect())
        await attempts.begun.wait()
        await client.close()
        attempts.may_go.set()
        with pytest.raises(InvalidRequest, match="closed"):
            await connecting
        assert len(attempts.made) == 1
        assert not attempts.linked
        assert client._caller._recovering is None

    run(work)
