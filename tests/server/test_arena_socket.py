"""The arena socket lets processes of a session in, hands out memory, and notices when they go."""

import asyncio
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvstore import BlockKey, Client, NamespaceId
from kvstore.client.connection import Connection
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.arena_wire import Extent, Hello, Packet, Refused, Welcome, receive, send


class Nobody:
    """Watches a connection and does nothing about it."""

    def lost(self, connection: Connection) -> None: ...
    def ended(self, connection: Connection) -> None: ...


def exchange(daemon: Daemon, talk: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Run `talk` on a connection to the arena socket."""

    async def run() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            path = f"{daemon.socket}.arena"
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().sock_connect(connection, path)
                await talk(connection)

    asyncio.run(run())


def touched(pid: int) -> dict[str, int]:
    """Return how many bytes of each extent that a process maps are in its page tables."""
    nbytes: dict[str, int] = {}
    inode = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inode = fields[4] if "memfd:kvstore-arena" in line else ""
        elif inode and fields[0] == "Rss:":
            nbytes[inode] = int(fields[1]) << 10
    return nbytes


def refusal(daemon: Daemon, packet: Packet) -> Refused:
    replies: list[Packet | None] = []

    async def talk(connection: socket.socket) -> None:
        await send(connection, packet)
        replies.append((await receive(connection))[0])
        assert await receive(connection) == (None, None)

    exchange(daemon, talk)
    (reply,) = replies
    assert isinstance(reply, Refused)
    return reply


def test_a_hello_of_another_version_is_refused_naming_both(daemon: Daemon) -> None:
    refused = refusal(daemon, Hello(RPC_VERSION + 1, 1, "t" * 16))
    assert refused.error == "Incompatible"
    assert f"{RPC_VERSION + 1}" in refused.message
    assert f"{RPC_VERSION}" in refused.message


def test_a_hello_to_no_session_is_refused(daemon: Daemon) -> None:
    assert refusal(daemon, Hello(RPC_VERSION, 1, "t" * 16)).error == "SessionEnded"


def test_a_session_is_joined_by_its_token_alone(daemon: Daemon) -> None:
    """Nor is the daemon's own one, which has none, by any number."""
    with Client(daemon.target, name="engine") as client:
        client.connect()
        connection: Any = client._client._caller._connection
        for token in ("", "t" * 16):
            refused = refusal(daemon, Hello(RPC_VERSION, connection.session, token))
            assert refused.error == "SessionEnded"
            for session in (0, -1, (1 << 64) - 1):
                refusal(daemon, Hello(RPC_VERSION, session, token))
        assert client.admin.stats()["clients"][-1]["processes"] == 1
        keys = sample_keys("token", 2)
        client.put(client.register(sample_namespace()), keys, sample_records(keys))


def test_another_packet_than_hello_is_refused(daemon: Daemon) -> None:
    assert refusal(daemon, Extent(0, 4096)).error == "Incompatible"


@pytest.mark.parametrize("junk", [b"\xc1", b"x" * 5000, b"\x80"])
def test_junk_is_refused_and_the_daemon_lives_on(daemon: Daemon, junk: bytes) -> None:
    async def talk(connection: socket.socket) -> None:
        connection.send(junk)
        reply, _ = await receive(connection)
        assert isinstance(reply, Refused)

    exchange(daemon, talk)
    with Client(daemon.target) as client:
        client.connect()
        assert client.local


def test_every_extent_arrives_those_made_later_too() -> None:
    with Daemon("dram.extent=2MiB", "dram.capacity=64MiB", file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            client.connect()
            until(lambda: len(client.extents()) == 32)
            assert {len(view) for view in client.extents().values()} == {2 << 20}


def test_both_ends_touch_the_whole_arena_before_it_is_needed() -> None:
    with Daemon("dram.extent=16MiB", "dram.capacity=64MiB", file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            client.connect()
            until(lambda: len(client.extents()) == 4)
            until(lambda: sum(touched(daemon.pid).values()) == 64 << 20)
            until(lambda: touched(daemon.pid).items() <= touched(os.getpid()).items())


def test_an_extent_cannot_be_shrunk_under_the_daemon(daemon: Daemon) -> None:
    async def run() -> None:
        process = await Connection.open(
            daemon.target, token="t" * 16, name="", timeout_s=5, watcher=Nobody()
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, f"{daemon.socket}.arena")
            await send(connection, Hello(RPC_VERSION, process.session, "t" * 16))
            welcome, _ = await receive(connection)
            assert isinstance(welcome, Welcome)
            _, fd = await receive(connection)
            assert fd is not None
            try:
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, 0)
                assert not os.get_inheritable(fd)
                mmap.mmap(fd, 4096).close()
            finally:
                os.close(fd)
        await process.close()

    asyncio.run(run())


def test_the_death_of_one_member_ends_the_session_of_all(daemon: Daemon) -> None:
    token = secrets.token_hex(16)
    keys = sample_keys("processes", 3)
    script = (
        "import sys, kvstore\n"
        "client = kvstore.Client(sys.argv[1], token=sys.argv[2])\n"
        "client.connect()\n"
        "print('joined', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with (
        Client(daemon.target, token=token) as scheduler,
        Client(daemon.target, token=token) as worker,
    ):
        namespace_id = scheduler.register(sample_namespace())
        scheduler.put(namespace_id, keys, sample_records(keys))
        worker.connect()
        with subprocess.Popen(
            [sys.executable, "-c", script, daemon.target, token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"joined\n"
            lease = scheduler.acquire(namespace_id, keys)
            other.kill()
            other.wait()
        # Its slots are kept, as the living processes may still be copying; but it does not count.
        until(lambda: scheduler.admin.stats()["dram"]["limbo_bytes"])
        assert scheduler.release(lease.lease_id) == [False]
        # All go on in a new session, also processes that only view and release.
        until(lambda: scheduler.release(_lease(scheduler, namespace_id, keys)) == [True])
        until(lambda: worker.release(_lease(scheduler, namespace_id, keys)) == [True])
        grant = scheduler.acquire(namespace_id, keys)
        views = [bytes(worker.view(slot)) for slot in grant.slots if slot]
        assert views == sample_records(keys)


def _lease(client: Client, namespace_id: NamespaceId, keys: list[BlockKey]) -> int:
    return client.acquire(namespace_id, keys).lease_id


def test_a_grant_that_comes_too_late_for_its_client_is_taken_back(daemon: Daemon) -> None:
    async def run() -> None:
        namespace = sample_namespace()
        process = await Connection.open(
            daemon.target, token="u" * 16, name="", timeout_s=5, watcher=Nobody()
        )
        spec = pb.RegisterNamespaceRequest(spec_json=namespace.to_json())
        await process.stub.RegisterNamespace(spec, timeout=5)
        request = pb.ReserveRequest(
            session=process.session,
            namespace_id=namespace.id,
            keys=sample_keys("late", 1)[0],
            spans=[pb.Span(begin=0, end=1)],
        )
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError):
                await process.stub.Reserve(request, timeout=0.015)
        stats = await process.stub.Stats(pb.StatsRequest(), timeout=5)
        assert json.loads(stats.json)["leases"] == 0
        await process.close()

    asyncio.run(run())
