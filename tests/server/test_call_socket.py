"""The call socket: what is not a call ends only its own link, and nobody's grant is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import AsyncClient, Client, Part, Span, Unavailable
from kvstore.client.calls import CallStub
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.calls import BUFFERED_NBYTES_ALL, CALLS_MAX
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.call_wire import METHODS, Frame, FrameLink, Kind, decode_status
from kvstore.transport.messages import MESSAGE_NBYTES_MAX

NUMBER = {method.name: number for number, method in enumerate(METHODS)}
HEADER = struct.Struct("<IQBBxxd")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(file=False) as daemon:
        yield daemon.start()


def connected(daemon: Daemon) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(10)
    link.connect(f"{daemon.socket}.calls")
    return link


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(MESSAGE_NBYTES_MAX + 1, 1, Kind.REQUEST, 0, 1.0),
        HEADER.pack(0, 1, 77, 0, 1.0),
        HEADER.pack(0, 1, Kind.REPLY, 0, 1.0),
        HEADER.pack(0, 1, Kind.REQUEST, len(METHODS), 1.0),
        HEADER.pack(0, 1, Kind.REQUEST, 0, float("nan")),
    ],
    ids=["too_long", "unknown_kind", "reply", "unknown_method", "no_time"],
)
def test_what_is_no_call_ends_the_link_and_nothing_else(daemon: Daemon, header: bytes) -> None:
    with connected(daemon) as link:
        link.sendall(header)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""
    with Client(daemon.target) as client:
        assert client.match(client.register(sample_namespace()), sample_keys("none", 3)) is not None


def test_a_message_that_is_none_is_refused_and_the_link_goes_on(daemon: Daemon) -> None:
    with connected(daemon) as link, link.makefile("rb") as answers:
        for number in range(2):
            link.sendall(Frame(Kind.REQUEST, number, b"\xff\xff", NUMBER["Match"], 5.0).encode())
            nbytes, call, kind, _, _ = HEADER.unpack(answers.read(HEADER.size))
            status = decode_status(answers.read(nbytes))
            assert (call, kind, status.code) == (number, Kind.ERROR, 3)
            assert ("kvstore-error", "InvalidRequest") in status.metadata


def test_a_call_that_nobody_waits_for_any_more_ends_at_the_daemon(daemon: Daemon) -> None:
    """The arena is full of leased blocks; whoever reserves has to wait, and gives up."""
    namespace = sample_namespace()
    with Client(daemon.target) as client:
        namespace_id = client.register(namespace)
        record = namespace.groups[0].record_nbytes
        keys = sample_keys("full", 2 * (64 << 20) // record)
        spans = [Span(Part(0, 0), 0, len(keys))]
        held = client.reserve(namespace_id, keys, first_block=0, parent=None, spans=spans)
        assert held.refused
        more = sample_keys("more", 4)
        waiting = client.submit(
            lambda remote: remote.reserve(
                namespace_id,
                more,
                first_block=0,
                parent=None,
                spans=[Span(Part(0, 0), 0, 4)],
                wait_s=20.0,
            )
        )
        until(lambda: client.admin.stats()["queues"]["room"] == 1)
        waiting.cancel()
        until(lambda: client.admin.stats()["queues"]["room"] == 0)
        client.release(held.lease_id)


class Lagging(FrameLink):
    """A daemon that answers when it is told that nobody waits any more."""

    def __init__(self) -> None:
        super().__init__(self.take, lambda: None)
        self.taken: list[Frame] = []
        self._arrived: asyncio.Queue[None] = asyncio.Queue()

    async def took(self, frames: int) -> None:
        """Wait until so many have come, ever."""
        while len(self.taken) < frames:
            await self._arrived.get()

    def take(self, frame: Frame) -> None:
        self.taken.append(frame)
        self._arrived.put_nowait(None)
        if frame.kind is Kind.CANCEL:
            self.send(Frame(Kind.REPLY, frame.id, pb.GrantReply(lease=9).SerializeToString()))


@pytest.mark.parametrize("cancel", [True, False], ids=["cancelled", "late"])
def test_a_grant_that_comes_too_late_is_given_back(tmp_path: Path, cancel: bool) -> None:
    async def scenario() -> pb.ReleaseRequest:
        daemon = Lagging()
        path = str(tmp_path / "s")
        server = await asyncio.get_running_loop().create_unix_server(lambda: daemon, path)
        stub = await CallStub.connect(path, None)
        request = pb.AcquireRequest(session=7, readers=2)
        call = asyncio.create_task(stub.Acquire(request, timeout=60.0 if cancel else 0.05))
        await daemon.took(1)
        if cancel:
            call.cancel()
        await asyncio.wait([call])
        await daemon.took(3)
        stub.close()
        server.close()
        assert daemon.taken[2].method == NUMBER["Release"]
        return pb.ReleaseRequest.FromString(daemon.taken[2].body)

    released = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert (released.session, list(released.leases)) == (7, [9, 9])


class Prompt(FrameLink):
    """A daemon that grants at once."""

    def __init__(self) -> None:
        super().__init__(self.take, lambda: None)
        self.released: asyncio.Future[pb.ReleaseRequest] = asyncio.Future()

    def take(self, frame: Frame) -> None:
        if frame.method == NUMBER["Release"]:
            self.released.set_result(pb.ReleaseRequest.FromString(frame.body))
        else:
            self.send(Frame(Kind.REPLY, frame.id, pb.GrantReply(lease=9).SerializeToString()))


class CancelledOnAnswer(CallStub):
    """Whoever waits is cancelled in the very turn in which the answer comes."""

    call: asyncio.Task[object]

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        self.call.cancel()


def test_a_grant_that_came_just_before_the_cancellation_is_given_back(tmp_path: Path) -> None:
    async def scenario() -> pb.ReleaseRequest:
        daemon = Prompt()
        path = str(tmp_path / "s")
        server = await asyncio.get_running_loop().create_unix_server(lambda: daemon, path)
        stub = await CancelledOnAnswer.connect(path, None)
        assert isinstance(stub, CancelledOnAnswer)
        stub.call = asyncio.create_task(stub.Acquire(pb.AcquireRequest(session=7), timeout=60.0))
        await asyncio.wait([stub.call])
        assert stub.call.cancelled()
        released = await daemon.released
        stub.close()
        server.close()
        return released

    released = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert (released.session, list(released.leases)) == (7, [9])


def test_calls_beyond_the_bound_are_refused_and_the_others_answered(daemon: Daemon) -> None:
    """As many calls as fit wait for room; one more is told so, at once, on the same link."""
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        keys = sample_keys("full", 2 * (64 << 20) // sample_namespace().groups[0].record_nbytes)
        spans = [Span(Part(0, 0), 0, len(keys))]
        held = client.reserve(namespace_id, keys, first_block=0, parent=None, spans=spans)

        async def wait(remote: AsyncClient) -> object:
            one = [Span(Part(0, 0), 0, 1)]
            more = sample_keys("more", 1)
            return await remote.reserve(
                namespace_id, more, first_block=0, parent=None, spans=one, wait_s=20.0
            )

        waiting = [client.submit(wait) for _ in range(CALLS_MAX)]
        until(lambda: client.admin.stats()["queues"]["room"] == CALLS_MAX)
        with pytest.raises(Unavailable, match="being answered"):
            client.submit(wait).result(10)
        assert client.match(namespace_id, keys[:3]).hit_blocks == 0  # what waits for nothing
        for call in waiting:
            call.cancel()
        until(lambda: client.admin.stats()["queues"]["room"] == 0)
        assert client.release(held.lease_id) == [True]


def test_a_daemon_that_dies_fails_the_calls_under_way_at_once() -> None:
    with Daemon() as daemon, Client(daemon.start().target, timeout_s=30.0) as client:
        keys = sample_keys("dies", 4)
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, keys, sample_records(keys))
        daemon.kill()
        with pytest.raises(Unavailable):
            client.match(namespace_id, keys)


def test_frames_that_are_never_finished_hold_little_together(daemon: Daemon) -> None:
    """Each link alone may hold a message. The greediest end, whoever asks little goes on."""
    half = HEADER.pack(MESSAGE_NBYTES_MAX, 1, Kind.REQUEST, 0, 1.0) + bytes(MESSAGE_NBYTES_MAX - 1)
    with Client(daemon.target) as client, contextlib.ExitStack() as stack:
        namespace_id = client.register(sample_namespace())
        for _ in range(40):
            link = stack.enter_context(connected(daemon))
            with contextlib.suppress(ConnectionError):
                link.sendall(half)
        assert client.match(namespace_id, sample_keys("none", 3)).hit_blocks == 0
        refused = client.admin.stats()["totals"]["rpc_errors"]
        ended = sum(count for name, count in refused.items() if name.endswith("/links"))
        assert ended >= 40 - BUFFERED_NBYTES_ALL // MESSAGE_NBYTES_MAX - 1
        assert client.breaker_trips == 0
