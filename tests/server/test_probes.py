"""The metrics port: what is there, and when /healthz and /readyz say no."""

import asyncio
import contextlib
import http.client
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client import Client
from kvstore.daemon import Node
from kvstore.model.block import Group, Namespace
from kvstore.model.errors import KVStoreError
from kvstore.model.keys import KeyChain, root_key
from kvstore.server import health, metrics_port
from kvstore.settings import load_settings
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until

MIB = 1 << 20
SPEC = Namespace(16, (Group("full", MIB),), ())


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), dict(reply.getheaders())
    finally:
        connection.close()


def grpc_status(daemon: Daemon) -> int:
    with grpc.insecure_channel(daemon.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service="kvstore.rpc.v1.KVStore"))
        return int(reply.status)


def test_only_what_there_is_answers(daemon: Daemon) -> None:
    port = daemon.metrics_port
    status, body, headers = ask(port, "/metrics")
    assert status == 200
    assert "kvstore_build_info" in body
    assert headers["Content-Type"].startswith("text/plain; version=")
    for path in ("/healthz", "/readyz", "/readyz?verbose"):
        assert ask(port, path)[:2] == (200, "ok\n")
    for path in ("/anything", "/metrics/", "/healthz/x", "/../metrics", "/%6detrics"):
        status, body, headers = ask(port, path)
        assert status == 404, path
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "kvstore_" not in body


def test_head_has_no_body_and_other_methods_are_refused(daemon: Daemon) -> None:
    port = daemon.metrics_port
    for path, status in (("/metrics", 200), ("/healthz", 200), ("/readyz", 200), ("/no", 404)):
        told, body, headers = ask(port, path, "HEAD")
        assert (told, body) == (status, "")
        assert int(headers["Content-Length"]) > 0
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        told, _, headers = ask(port, "/metrics", method)
        assert (told, headers["Allow"]) == (405, "GET, HEAD")
    assert ask(port, "/metrics", "BREW")[0] == 501


def test_one_metric_by_name(daemon: Daemon) -> None:
    _, body, _ = ask(daemon.metrics_port, "/metrics?name[]=kvstore_sessions")
    names = {line.split("{")[0].split(" ")[0] for line in body.splitlines() if line[0] != "#"}
    assert names == {"kvstore_sessions"}


def test_clients_that_say_nothing_do_not_keep_probes_from_being_answered(daemon: Daemon) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", daemon.metrics_port))
        for _ in range(3 * metrics_port.CONNECTIONS_MAX)
    ]
    try:
        for each in silent:
            each.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        began = time.monotonic()
        assert ask(daemon.metrics_port, "/healthz")[0] == 200
        assert time.monotonic() - began < 2
        silent[0].settimeout(5)
        assert silent[0].recv(1) == b""  # the oldest had to go
    finally:
        for each in silent:
            each.close()


KEYS = KeyChain(root_key(SPEC.id), 16).update(range(16 * 62))
OTHERS = KeyChain(root_key(SPEC.id), 16).update(range(5, 5 + 16 * 8))


def lease_everything(client: Client) -> int:
    """Fill the arena and hold it; returns the lease."""
    client.register(SPEC)
    until(lambda: not client.admin.stats()["dram"]["growing"])
    assert client.put(SPEC.id, KEYS, [bytes(MIB)] * len(KEYS)).refused == 0
    lease = client.acquire(SPEC.id, KEYS)
    assert lease.leased
    assert lease.hit_blocks == len(KEYS)
    return lease.lease_id


def put_more(client: Client, wait_s: float) -> int:
    """Put what has no room; returns how many records were refused."""
    return client.put(SPEC.id, OTHERS, [bytes(MIB)] * len(OTHERS), wait_s=wait_s).refused


def test_probes_name_no_tenant() -> None:
    tenant = ("dram.capacity=64MiB", "tenants.secret.dram.guaranteed=64MiB")
    with Daemon("limits.leased_fraction=1", *tenant, file=False) as daemon:
        daemon.start()
        with Client(f"unix:{daemon.socket.parent / 'secret/kvstore.sock'}") as client:
            lease_everything(client)
            put_more(client, 0.0)

            def refused() -> bool:
                assert put_more(client, 0.0)
                return ask(daemon.metrics_port, "/readyz")[0] == 503

            until(refused, 15)
            assert ask(daemon.metrics_port, "/readyz")[1].startswith("no tenant can be served")
            assert "tenant secret: no tier takes writes" in daemon.log.read_text()


def test_a_daemon_whose_arena_clients_hold_is_not_ready_until_they_let_go() -> None:
    with (
        Daemon("limits.leased_fraction=1", file=False) as daemon,
        Client(daemon.start().target) as client,
    ):
        lease = lease_everything(client)
        put_more(client, 0.0)  # takes what is left of the arena
        began = time.monotonic()

        def refused() -> bool:
            assert put_more(client, 0.0)
            return ask(daemon.metrics_port, "/readyz")[0] == 503

        until(refused, 15)
        assert time.monotonic() - began > 4  # not for a moment's sake
        assert "leases and pins hold" in ask(daemon.metrics_port, "/readyz")[1]
        assert ask(daemon.metrics_port, "/healthz")[0] == 200
        until(lambda: grpc_status(daemon) == health_pb2.HealthCheckResponse.NOT_SERVING)
        client.release(lease)
        until(lambda: ask(daemon.metrics_port, "/readyz")[0] == 200)
        until(lambda: grpc_status(daemon) == health_pb2.HealthCheckResponse.SERVING)


def test_a_daemon_that_drains_is_not_ready() -> None:
    with Daemon("limits.leased_fraction=1", "server.drain_s=5", file=False) as daemon:
        with Client(daemon.start().target, timeout_s=10) as client:
            lease_everything(client)
            put_more(client, 0.0)
            told: set[tuple[int, str]] = set()

            def watch() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        told.add(ask(daemon.metrics_port, "/readyz")[:2])

            # A call that runs keeps the drain from being over at once.
            waiting = threading.Thread(target=hold_a_call, args=(client,))
            waiting.start()
            time.sleep(0.3)
            watcher = threading.Thread(target=watch)
            watcher.start()
            until(lambda: told)
            assert daemon.stop() == 0
            watcher.join(5)
            waiting.join(5)
        assert told == {(200, "ok\n"), (503, "draining: the daemon is shutting down\n")}


def hold_a_call(client: Client) -> None:
    with contextlib.suppress(KVStoreError):  # the daemon stops meanwhile
        put_more(client, 2.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


def test_probes_answer_while_the_daemon_starts_and_while_its_event_loop_hangs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HANG_S", 1.0)
    settings = load_settings(
        None,
        [
            f"server.socket={directory}/run/k.sock",
            "server.metrics_listen=127.0.0.1:0",
            "dram.capacity=4MiB",
            f"file.path={directory}/file",
        ],
    )

    async def live() -> None:
        node = Node(settings)

        async def probe(path: str) -> tuple[int, str]:
            return (await asyncio.to_thread(ask, node.server.metrics_port, path))[:2]

        await node.server.open()
        assert (await probe("/healthz"))[0] == 200
        status, why = await probe("/readyz")
        assert (status, why.split(" ")[0]) == (503, "starting")
        await node.tenants.start()
        await node.server.start()
        assert (await probe("/readyz"))[0] == 200

        hung: list[tuple[int, str]] = []

        def look_while_it_hangs() -> None:
            time.sleep(1.8)
            hung.extend(ask(node.server.metrics_port, path)[:2] for path in ("/healthz", "/readyz"))

        looking = asyncio.create_task(asyncio.to_thread(look_while_it_hangs))
        await asyncio.sleep(0.05)
        time.sleep(2.5)  # noqa: ASYNC251 - the loop hangs
        await looking
        assert [status for status, _ in hung] == [503, 503]
        assert "event loop" in hung[0][1]
        await asyncio.sleep(2 * health.BEAT_S)
        assert (await probe("/healthz"))[0] == 200
        assert (await probe("/readyz"))[0] == 200
        await node.stop()

    asyncio.run(live())


def test_a_busy_tcp_port_is_found_before_the_file_tier_is_touched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Daemon() as second:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        second.start(f"server.listen={address}", "server.listen_open=true", wait=False)
        assert second.wait() == 2
        last = second.output().splitlines()[-1]
        assert last.startswith(f"Error: server.listen={address} cannot be had (Address already in")
        assert "add_port" not in second.output(), "gRPC says nothing of its own"
        assert not (second.directory / "file").exists()


def test_a_busy_metrics_port_is_found_before_the_file_tier_is_touched(daemon: Daemon) -> None:
    with Daemon(f"server.metrics_listen=127.0.0.1:{daemon.metrics_port}") as second:
        second.start(wait=False)
        assert second.wait() == 2
        assert "server.metrics_listen" in second.output()
        assert not (second.directory / "file").exists()
