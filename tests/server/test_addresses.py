"""One daemon per socket, port and directory; what a dead one left is no obstacle."""

import socket
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore import Client
from kvstore.testing.daemon import Daemon


@pytest.fixture
def second() -> Iterator[Daemon]:
    with Daemon(file=False) as second:
        yield second


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A running daemon at every address there is; tests must not stop it."""
    with Daemon(tcp=True) as daemon:
        yield daemon.start()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.socket={daemon.socket}", ("server.socket", "another kvstore daemon")),
        ("server.listen={daemon.address} server.listen_open=true", ("server.listen", "in use")),
        ("server.metrics_listen={daemon.address}", ("server.metrics_listen", "in use")),
        ("file.path={daemon.directory}/file", ("file", "another kvstore daemon")),
    ],
)
def test_a_second_daemon_is_refused_and_the_first_serves_on(
    daemon: Daemon, second: Daemon, setting: str, words: tuple[str, ...]
) -> None:
    second.start(*setting.format(daemon=daemon).split(), wait=False)
    assert second.wait() == 2
    for word in words:
        assert word in second.output()
    assert "Traceback" not in second.output()
    for target in (daemon.target, daemon.address):
        with Client(target) as client:
            client.admin.stats()


def test_a_directory_that_cannot_be_written_is_refused(second: Daemon) -> None:
    second.start("file.path=/proc/kvstore", wait=False)
    assert second.wait() == 2
    assert "/proc/kvstore" in second.output()
    assert "Traceback" not in second.output()


def test_a_file_where_the_socket_should_be_is_refused_and_kept(second: Daemon) -> None:
    second.socket.parent.mkdir(mode=0o700)
    second.socket.write_text("precious")
    second.start(wait=False)
    assert second.wait() == 2
    assert "not a socket" in second.output()
    assert second.socket.read_text() == "precious"


def test_a_foreign_server_on_the_socket_is_refused(second: Daemon) -> None:
    second.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(second.socket))
        foreign.listen()
        second.start(wait=False)
        assert second.wait() == 2
        assert "used by another process" in second.output()


def test_the_socket_of_a_killed_daemon_is_taken_over(second: Daemon) -> None:
    second.start()
    second.kill()
    assert second.socket.exists()
    second.start()
    with Client(second.target) as client:
        client.connect()
        assert client.local


def test_only_the_owner_may_reach_the_sockets(daemon: Daemon) -> None:
    arena = Path(f"{daemon.socket}.arena")
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(arena.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700


def test_health_is_served_for_probes(daemon: Daemon) -> None:
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(daemon.address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.rpc.v1.KVStore"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_are_served_over_http(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.admin.stats()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{daemon.metrics_port}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    assert 'kvstore_rpc_seconds_count{method="Stats"}' in text
    assert 'kvstore_dram_bytes{state="capacity"}' in text


def test_tcp_is_off_unless_somebody_has_said_what_it_opens(second: Daemon) -> None:
    second.start("server.listen=127.0.0.1:0", wait=False)
    assert second.wait() == 2
    for word in ("every user of this host", "server.listen_open=true"):
        assert word in second.output()
    second.start()
    assert second.port == 0


def test_every_address_but_the_socket_can_be_off() -> None:
    with Daemon("server.metrics_listen=", file=False) as daemon:
        daemon.start()
        assert (daemon.port, daemon.metrics_port) == (0, 0)
        with Client(daemon.target) as client:
            client.admin.stats()
