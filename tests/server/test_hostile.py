"""What hostile clients of the same user send and hold: the daemon serves on, and says so."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore import Client
from kvstore.model.errors import KVStoreError
from kvstore.system.descriptors import SHARES
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

MIB = 1 << 20
SPACE = sample_namespace("hostile")
KEYS = sample_keys("hostile", 40)
RECORDS = sample_records(KEYS)
DESCRIPTORS = 200
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def peak_nbytes(daemon: Daemon) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_compressed_message_does_not_inflate_beyond_the_limit(daemon: Daemon) -> None:
    """256 MiB of zeros take 256 KiB on the wire."""
    with grpc.insecure_channel(
        daemon.target,
        compression=grpc.Compression.Gzip,
        options=[("grpc.max_send_message_length", -1)],
    ) as channel:
        call = channel.unary_unary("/kvstore.rpc.v1.KVStore/RegisterNamespace")
        before = peak_nbytes(daemon)
        for _ in range(4):
            with pytest.raises(grpc.RpcError) as refused:
                call(bytes(256 * MIB), timeout=60)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_nbytes(daemon) - before < 64 * MIB
    with Client(daemon.target) as client:
        client.register(SPACE)


@pytest.fixture
def narrow() -> Iterator[Daemon]:
    """A daemon that may have few files open, whatever it asks for."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Daemon("dram.capacity=4MiB", "dram.extent=4MiB", "file.segment=4MiB") as daemon:
        daemon.start()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        yield daemon
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def flood(stack: contextlib.ExitStack, path: str, kind: socket.SocketKind) -> None:
    """Connect until nobody answers any more, and say nothing."""
    for _ in range(4 * DESCRIPTORS):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        connection.settimeout(0.2)
        try:
            connection.connect(path)
        except OSError:
            return


@pytest.mark.parametrize(
    ("socket_name", "kind"),
    [(".calls", socket.SOCK_STREAM), (".arena", socket.SOCK_SEQPACKET)],
)
def test_links_leave_the_disk_its_descriptors(
    narrow: Daemon, socket_name: str, kind: socket.SocketKind
) -> None:
    with Client(narrow.target) as client, contextlib.ExitStack() as stack:
        client.register(SPACE)
        flood(stack, f"{narrow.socket}{socket_name}", kind)
        until(lambda: descriptors(narrow) < DESCRIPTORS // 2)  # accepted at once, closed one by one
        assert client.put(SPACE.id, KEYS, RECORDS, durable=True).durable
        assert client.get(SPACE.id, KEYS) == RECORDS
        assert client.admin.stats()["file"]["state"] == "ok"


def test_links_of_several_tenants_leave_another_one_and_the_disk_theirs() -> None:
    noisy = [f"noisy{number}" for number in range(5)]
    tenants = [f"tenants.{name}.dram.guaranteed=4MiB" for name in (*noisy, "quiet")]
    files = [f"tenants.{name}.file.guaranteed=16MiB" for name in (*noisy, "quiet")]
    with (
        Daemon("dram.extent=4MiB", "file.segment=4MiB", *tenants, *files) as daemon,
        contextlib.ExitStack() as stack,
    ):
        daemon.start()
        before = descriptors(daemon)
        limit = before + DESCRIPTORS
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for name in noisy:
            path = f"{daemon.socket.parent / name / 'kvstore.sock'}.calls"
            for _ in range(limit // 4):
                link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                link.settimeout(0.2)
                with contextlib.suppress(OSError):
                    link.connect(path)
        until(lambda: descriptors(daemon) <= before + limit // 4)
        with Client(f"unix:{daemon.socket.parent / 'quiet' / 'kvstore.sock'}") as quiet:
            quiet.register(SPACE)
            assert quiet.put(SPACE.id, KEYS[:8], RECORDS[:8], durable=True).durable
            assert quiet.get(SPACE.id, KEYS[:8]) == RECORDS[:8]
            assert quiet.admin.stats()["file"]["state"] == "ok"
        daemon.stop()


class Tight(Daemon):
    """A daemon that is allowed few open files from its start on."""

    def command(self, *arguments: str) -> list[str]:
        limited = f'ulimit -n {DESCRIPTORS}; exec "$@"'
        return ["sh", "-c", limited, "sh", *super().command(*arguments)]


@pytest.fixture
def tight() -> Iterator[Tight]:
    with Tight("dram.capacity=4MiB", "dram.extent=4MiB", "file.segment=4MiB", tcp=True) as daemon:
        yield daemon
        daemon.stop()


def let_in(stack: contextlib.ExitStack, daemon: Daemon, target: str) -> list[socket.socket]:
    """Connect more often than the daemon may open files, as clients of gRPC that ask nothing;
    return the connections that it keeps."""
    links = []
    for _ in range(2 * DESCRIPTORS):
        if target == daemon.target:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            address: str | tuple[str, int] = str(daemon.socket)
        else:
            link = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            address = ("127.0.0.1", daemon.port)
        link.settimeout(5)
        with contextlib.suppress(OSError):
            link.connect(address)
            link.sendall(PREFACE)
        links.append(link)
    return [link for link in links if is_kept(link)]


def is_kept(link: socket.socket) -> bool:
    """Say whether a connection was greeted, and not closed since."""
    try:
        if not link.recv(4096):
            return False
        link.setblocking(False)
        while link.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def is_answered(target: str) -> bool:
    try:
        with Client(target) as client:
            client.register(SPACE)
    except KVStoreError:
        return False
    return True


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_connections_of_grpc_leave_the_disk_and_the_other_listener_theirs(
    tight: Tight, over: str
) -> None:
    tight.start()
    target, other = tight.target, tight.address
    if over == "tcp":
        target, other = other, target
    most = DESCRIPTORS // SHARES // 2 // 2  # of two listeners
    with Client(target) as client:
        client.register(SPACE)
        with contextlib.ExitStack() as stack:
            kept = let_in(stack, tight, target)
            assert most - 4 <= len(kept) < most, "the client has some of them"
            assert descriptors(tight) < DESCRIPTORS - most
            assert client.put(SPACE.id, KEYS, RECORDS, durable=True).durable
            assert client.get(SPACE.id, KEYS) == RECORDS
            assert client.admin.stats()["file"]["state"] == "ok"
            assert not is_answered(target)
            assert is_answered(other)
            assert all(map(is_open, kept))
        until(lambda: is_answered(target), 20)
        assert client.get(SPACE.id, KEYS) == RECORDS
    assert "Too many open files" not in tight.output()


def is_open(link: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(link.recv(4096))
    return True


def test_connections_that_say_nothing_are_closed(tight: Tight) -> None:
    tight.start()
    before = descriptors(tight)
    with contextlib.ExitStack() as stack:
        flood(stack, str(tight.socket), socket.SOCK_STREAM)
        until(lambda: descriptors(tight) <= before, 30)
        assert is_answered(tight.target)


def test_a_daemon_asks_for_more_files_than_it_was_given(daemon: Daemon) -> None:
    limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    found = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits)
    assert found is not None
    soft, hard = map(int, found.groups())
    assert soft == min(hard, 1 << 16)


def test_the_log_names_no_request_no_conversation_and_no_key() -> None:
    """At its most talkative, and when things go wrong."""
    with Daemon("server.log_level=debug", "limits.lease_s=0.5") as daemon:
        daemon.start()
        with Client(daemon.target, token="s3cret-" + "t" * 24) as client:
            client.register(SPACE)
            client.put(SPACE.id, KEYS, RECORDS, durable=True)
            asked = {"request_id": "req-of-a-prompt", "session_id": "chat-of-a-user"}
            grant = client.acquire(SPACE.id, KEYS, wait_s=1, **asked)
            client.hints.end_session("chat-of-a-user")
            until(lambda: "leases_expired=1" in daemon.output())
            client.release(grant.lease_id)
            client.admin.delete(SPACE.id, KEYS[:1], corrupt=True)
            with contextlib.suppress(KVStoreError):
                client.acquire(SPACE.id, KEYS * 2, request_id="req-of-a-prompt")
            client.admin.outcomes("req-of-a-prompt")
            client.admin.explain(SPACE.id, KEYS)
            client.admin.delete(SPACE.id, KEYS[:4])
            client.admin.clear(SPACE.id)
        daemon.stop()
        log = daemon.output()
    assert "level=DEBUG" in log
    for secret in ("req-of-a-prompt", "chat-of-a-user", "s3cret", *(key.hex() for key in KEYS)):
        assert secret not in log
