"""A real daemon under hostile messages and datagrams: typed errors, and it serves on."""

from __future__ import annotations

import array
import asyncio
import os
import resource
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import Client
from kvstore.client.arena import ClientArena
from kvstore.model.errors import Incompatible, KVStoreError
from kvstore.rpc import RPC_VERSION
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.arena_wire import Ended, Extent, Hello, Packet, Welcome, send
from tests.fuzz.service import REQUESTS
from tests.fuzz.service import seeds as good_calls
from tests.fuzz.strategies import mutations
from tests.fuzz.targets import TARGETS, Target

SERVICE = "/kvstore.rpc.v1.KVStore/"
STREAMED_UP, STREAMED_DOWN = {"Put"}, {"Get"}
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # it asked to wait longer than the call
}
FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that must outlive everything here, with its memory bounded."""
    with Daemon() as daemon:
        daemon.start()
        before = _memory_nbytes(daemon)
        yield daemon
        assert _memory_nbytes(daemon) - before < 128 << 20
        assert "error=unexpected" not in daemon.output()
        assert "Traceback" not in daemon.output()
        assert daemon.stop() == 0


def _memory_nbytes(daemon: Daemon) -> int:
    """Return what the daemon's process takes, the arena left out."""
    fields = Path(f"/proc/{daemon.pid}/status").read_text(encoding="ascii").split("\n")
    return next(int(line.split()[1]) << 10 for line in fields if line.startswith("RssAnon"))


def _serves(daemon: Daemon) -> None:
    keys = sample_keys(secrets.token_hex(4), 4)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        assert client.put(namespace_id, keys, sample_records(keys), durable=True).durable
        assert client.get(namespace_id, keys) == sample_records(keys)


@pytest.mark.parametrize("name", [name for name, _ in REQUESTS])
def test_hostile_messages_get_typed_errors(daemon: Daemon, name: str) -> None:
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(daemon.target, options=options) as channel:
        stub = _raw_stub(channel, name)
        calls = [call.SerializeToString() for own, call in good_calls(1) if own == name]
        target = Target(lambda data: None, calls or [b"\n\x02ab"])

        @FUZZ
        @given(mutations(target))
        def fuzz(data: bytes) -> None:
            assert _status(stub, name, data) in EXPECTED

        fuzz()
    _serves(daemon)


def _status(stub: Any, name: str, data: bytes) -> grpc.StatusCode:
    try:
        reply = stub(iter([data]) if name in STREAMED_UP else data, timeout=0.5)
        for _ in reply if name in STREAMED_DOWN else ():
            pass
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined, no-any-return]
    return grpc.StatusCode.OK


def _raw_stub(channel: grpc.Channel, name: str) -> Any:
    kinds = {
        (False, False): channel.unary_unary,
        (True, False): channel.stream_unary,
        (False, True): channel.unary_stream,
    }
    return kinds[name in STREAMED_UP, name in STREAMED_DOWN](SERVICE + name)


def test_one_key_in_two_namespaces_does_not_mix_them(daemon: Daemon) -> None:
    keys = sample_keys("both", 4)
    with Client(daemon.target) as client:
        first = client.register(sample_namespace("first"))
        second = client.register(sample_namespace("second"))
        client.put(first, keys, sample_records(keys))
        done = client.put(second, keys, sample_records(keys))
        assert (done.committed, done.existing) == (0, 4)
        assert client.get(second, keys) == [None] * 4
        assert client.get(first, keys) == sample_records(keys)
        assert client.admin.flush()


def test_blocks_beyond_the_index_and_zero_keys_harm_nobody(daemon: Daemon) -> None:
    zero = [bytes(32)]
    keys = sample_keys("after zero", 2)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        with pytest.raises(KVStoreError, match=r"2\*\*32"):
            client.put(namespace_id, keys, sample_records(keys), first_block=2**32 - 1)
        records = sample_records(keys)
        client.put(namespace_id, zero, records[:1])  # type: ignore[list-item]
        client.put(namespace_id, keys, records, first_block=1, parent=zero[0])  # type: ignore[arg-type]
        with pytest.raises(KVStoreError, match="one of the keys"):
            client.put(namespace_id, keys[:1], records[:1], parent=keys[0])
        assert client.admin.flush()
        assert len(client.admin.scan(namespace_id)) >= 3


def test_hostile_datagrams_and_descriptors(daemon: Daemon) -> None:
    """Junk, too much of it, other people's descriptors, and far too many of them."""
    path = f"{daemon.socket}.arena"
    pipe = os.pipe()
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))

    @FUZZ
    @given(mutations(TARGETS["packet"]) | st.binary(max_size=6000), st.integers(0, 8))
    def fuzz(data: bytes, descriptors: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(5)
            link.connect(path)
            fds = array.array("i", [pipe[0]] * descriptors)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
            link.sendmsg([data or b"\0"], ancillary)
            try:
                link.recv(4096)
            except ConnectionResetError:
                pass  # closed on what it had not read yet

    fuzz()
    for fd in pipe:
        os.close(fd)
    until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before + 2)
    _serves(daemon)


def test_a_daemon_out_of_descriptors_lets_members_in_again_later() -> None:
    with Daemon() as daemon:
        daemon.start()
        until(lambda: "arena=complete" in daemon.output())
        used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        _, most = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 1, most))
        links = []
        for _ in range(12):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.setblocking(False)
            link.connect(f"{daemon.socket}.arena")
            links.append(link)
        until(lambda: "arena_link=not_accepted" in daemon.output())
        for link in links:
            link.close()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 100, most))
        _serves(daemon)


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("not-sealed")
    os.ftruncate(fd, nbytes)
    return fd


@pytest.mark.parametrize(
    ("packet", "with_fd"),
    [
        (Extent(1, 4096), True),  # not sealed: it could shrink under the engine
        (Extent(1, 1 << 50), True),
        (Extent(1, -1), True),
        (Extent(1, 4096), False),
        (Ended(), False),
    ],
)
def test_a_lying_daemon_cannot_have_a_client_map_what_may_kill_it(
    tmp_path: Path, packet: Packet, with_fd: bool
) -> None:
    async def run() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            path = f"/tmp/kv-{secrets.token_hex(8)}"
            listener.bind(path)
            listener.listen(1)
            listener.setblocking(False)
            ended: list[bool] = []
            joining = asyncio.create_task(
                ClientArena.join(
                    path,
                    Hello(RPC_VERSION, 1, "t" * 16),
                    2.0,
                    on_lost=lambda: None,
                    on_ended=lambda: ended.append(True),
                )
            )
            daemon, _ = await asyncio.get_running_loop().sock_accept(listener)
            fd = _memfd(4096)
            try:
                await send(daemon, Welcome(1))
                await send(daemon, packet, [fd] if with_fd else [])
                if isinstance(packet, Ended):
                    arena = await joining
                    assert ended
                    await arena.close()
                else:
                    with pytest.raises(Incompatible):
                        await joining
            finally:
                os.close(fd)
                daemon.close()
                os.unlink(path)

    asyncio.run(run())
