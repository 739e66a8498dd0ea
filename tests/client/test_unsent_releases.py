"""A release that could not be sent is sent when the daemon answers again, and no release twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from kvstore import AsyncClient, Client, InvalidRequest, Part, Span, Unavailable
from kvstore.client.batch import Batch
from kvstore.client.calls import CallStub
from kvstore.client.copying import Copiers
from kvstore.client.in_place import InPlace
from kvstore.client.unreleased import UNRELEASED_MAX, Unreleased
from kvstore.model.block import Grant
from kvstore.rpc.status import ERROR_KEY
from kvstore.system.patience import Patience
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES, sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.call_wire import METHODS

SPACE = sample_namespace("unsent")
KEYS = sample_keys("unsent", 4)
NEW_KEYS = sample_keys("unsent and new", 4)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that tests share; they may stop it for a moment."""
    with Daemon("limits.lease_s=20", file=False) as daemon:
        yield daemon.start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client of a daemon that has KEYS."""
    with Client(daemon.target) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, sample_records(KEYS))
        yield client


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if daemon.alive:
            os.kill(daemon.pid, signal.SIGCONT)


@contextmanager
def refusing(client: Client, daemon: Daemon) -> Iterator[None]:
    """The daemon is stopped, and the client refuses calls; after it, the client takes them."""
    with stopped(daemon):
        client.submit(lambda remote: remote.doubt()).result()
        yield
    until(lambda: client.available)


def reserved(client: Client) -> Grant:
    spans = [Span(Part(0, 0), 0, len(NEW_KEYS))]
    return client.reserve(SPACE.id, NEW_KEYS, first_block=0, parent=None, spans=spans)


def leases(client: Client) -> int:
    return int(client.admin.stats()["leases"])


def limbo_nbytes(client: Client) -> int:
    return int(client.admin.stats()["dram"]["limbo_bytes"])


def test_a_release_that_was_refused_here_is_sent_later(daemon: Daemon, client: Client) -> None:
    some = [client.acquire(SPACE.id, KEYS).lease_id for _ in range(3)]
    with refusing(client, daemon):
        for lease in some:
            with pytest.raises(Unavailable):
                client.release(lease)
    until(lambda: leases(client) == 0)
    assert client.release(*some) == [False] * 3


def test_a_lease_of_two_readers_is_released_once_by_one(daemon: Daemon, client: Client) -> None:
    lease = client.acquire(SPACE.id, KEYS, readers=2).lease_id
    other = client.acquire(SPACE.id, KEYS).lease_id
    with refusing(client, daemon):
        for each in (lease, lease, other):
            with pytest.raises(Unavailable):
                client.release(each)
    until(lambda: leases(client) == 1)
    assert client.release(lease) == [True]
    assert leases(client) == 0


def test_whoever_releases_for_all_readers_does_so_later(daemon: Daemon, client: Client) -> None:
    lease = client.acquire(SPACE.id, KEYS, readers=3).lease_id
    with refusing(client, daemon), pytest.raises(Unavailable):
        client.release(lease, lease, lease)
    until(lambda: leases(client) == 0)


def test_a_release_without_an_answer_is_not_repeated(daemon: Daemon) -> None:
    with Client(daemon.target, timeout_s=0.2) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, sample_records(KEYS))
        lease = client.acquire(SPACE.id, KEYS, readers=2).lease_id
        other = client.acquire(SPACE.id, KEYS).lease_id
        with stopped(daemon):
            with pytest.raises(Unavailable):
                client.release(lease)
            with pytest.raises(Unavailable):
                client.release(other)  # not sent
        until(lambda: client.available)
        until(lambda: leases(client) == 1)
        assert client.release(lease) == [True]


def test_a_commit_that_was_refused_here_leaves_no_reservation(
    daemon: Daemon, client: Client
) -> None:
    lease = reserved(client).lease_id
    with refusing(client, daemon), pytest.raises(Unavailable):
        client.commit(lease, [0] * len(NEW_KEYS))
    until(lambda: leases(client) == 0)


def test_a_put_whose_commit_fails_leaves_no_reservation(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CallStub._call

    async def failing(stub: CallStub, number: int, *args: Any, **options: Any) -> Any:
        if METHODS[number].name == "Commit":
            raise Unavailable("the daemon does not take calls as fast as they are made")
        return await call(stub, number, *args, **options)

    monkeypatch.setattr(CallStub, "_call", failing)
    with Client(daemon.target) as client:
        client.register(SPACE)
        with pytest.raises(Unavailable, match="as fast"):
            client.put(SPACE.id, NEW_KEYS, sample_records(NEW_KEYS))
        until(lambda: leases(client) == 0)


def test_a_put_whose_copy_fails_leaves_no_reservation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any) -> list[int]:
        raise Unavailable("no thread can be started now")

    monkeypatch.setattr(Copiers, "fill", failing)
    with pytest.raises(Unavailable, match="no thread"):
        client.put(SPACE.id, NEW_KEYS, sample_records(NEW_KEYS))
    assert leases(client) == 0


def test_a_commit_that_comes_too_late_leaves_nothing_in_limbo() -> None:
    with Daemon("limits.lease_s=1", file=False) as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        lease = reserved(client).lease_id
        until(lambda: limbo_nbytes(client))
        with pytest.raises(InvalidRequest, match="expired"):
            client.commit(lease, [0] * len(NEW_KEYS))
        until(lambda: limbo_nbytes(client) == 0)


@pytest.mark.parametrize("loads", [False, True])
def test_what_a_lookup_leased_is_given_back_later(
    daemon: Daemon, client: Client, loads: bool
) -> None:
    lease = client.submit(lambda remote: remote.look_up(SPACE.id, KEYS)).result().lease
    assert lease is not None
    targets = [bytearray(RECORD_NBYTES) for _ in KEYS]

    async def use(remote: AsyncClient) -> None:
        if loads:
            await remote.get_into(SPACE.id, KEYS, targets, lease=lease)
        else:
            await remote.give_back(lease)

    with refusing(client, daemon):
        if loads:
            with pytest.raises(Unavailable):
                client.submit(use).result()
        else:
            client.submit(use).result()
    until(lambda: leases(client) == 0)


def test_a_daemon_that_was_restarted_is_told_of_no_old_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []
    call = CallStub._call

    async def noted(stub: CallStub, number: int, *args: Any, **options: Any) -> Any:
        sent.append(METHODS[number].name)
        return await call(stub, number, *args, **options)

    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, sample_records(KEYS))
        lease = client.acquire(SPACE.id, KEYS).lease_id
        with stopped(daemon):
            client.submit(lambda remote: remote.doubt()).result()
            with pytest.raises(Unavailable):
                client.release(lease)
            daemon.kill()
        monkeypatch.setattr(CallStub, "_call", noted)
        daemon.start()
        until(lambda: client.available)
        client.match(SPACE.id, KEYS)
        client.match(SPACE.id, KEYS)
    assert sent == ["Match", "Match"]


class Staged:
    """A session beside a sealed arena whose daemon answers no commit."""

    staging_nbytes = 8 * RECORD_NBYTES

    def __init__(self) -> None:
        self.reserved: list[int] = []
        self.released: list[int] = []
        self.committing = asyncio.Event()

    async def reserve(self, *args: Any, **options: Any) -> Grant:
        lease = len(self.reserved) + 1
        self.reserved.append(lease)
        return Grant(lease, 30.0, (), (None,) * len(args[1]), (0,) * len(args[1]), 0, leased=True)

    async def commit(self, *args: Any) -> None:
        self.committing.set()
        await asyncio.Event().wait()

    async def release(self, *lease_ids: int) -> list[bool]:
        self.released += lease_ids
        return [True] * len(lease_ids)


def test_a_put_that_is_cancelled_releases_what_its_pieces_have() -> None:
    session: Any = Staged()
    copiers = Copiers()

    async def put() -> None:
        batch = Batch(SPACE.id, sample_keys("pieces", 12), Part(0, 0), RECORD_NBYTES)
        records = [memoryview(each) for each in sample_records([*batch.keys])]
        in_place, patience = InPlace(session, copiers), Patience(0.0)
        putting = asyncio.create_task(in_place.put(batch, records, False, patience))
        await session.committing.wait()
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()

    asyncio.run(asyncio.wait_for(put(), 10))
    copiers.close()
    assert len(session.reserved) > 1
    assert sorted(session.released) == session.reserved


class Stub:
    """Answers releases, or fails as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[list[int]] = []

    async def Release(self, request: Any, timeout: float) -> None:  # noqa: ASYNC109, N802
        self.calls.append(list(request.leases))
        if self.error is not None:
            raise self.error


def failed(code: grpc.StatusCode, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), "no")


def send(unreleased: Unreleased, stub: Stub, most: int = UNRELEASED_MAX) -> int:
    sending: Callable[..., Awaitable[int]] = unreleased.send

    async def sent() -> int:
        return await sending(stub, 1, timeout_s=1.0, most=most)

    return asyncio.run(sent())


def test_a_call_names_no_more_than_a_daemon_takes() -> None:
    unreleased, stub = Unreleased(), Stub()
    unreleased.add([1, 2, 2, 3, 4])
    assert send(unreleased, stub, most=2) == 5
    assert stub.calls == [[1, 2], [2, 3], [4]]
    assert not unreleased


def test_so_many_are_noted_at_most() -> None:
    unreleased, stub = Unreleased(), Stub()
    unreleased.add(range(UNRELEASED_MAX))
    unreleased.add([UNRELEASED_MAX, UNRELEASED_MAX + 1])
    assert send(unreleased, stub) == UNRELEASED_MAX
    assert stub.calls[0][0] == 2


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (Unavailable("the daemon does not take calls as fast as they are made"), True),
        (failed(grpc.StatusCode.UNAVAILABLE, (ERROR_KEY, "Unavailable")), True),
        (failed(grpc.StatusCode.INVALID_ARGUMENT, (ERROR_KEY, "InvalidRequest")), False),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED), False),
    ],
)
def test_only_what_had_no_effect_is_sent_once_more(error: Exception, stays: bool) -> None:
    unreleased, stub = Unreleased(), Stub(error)
    unreleased.add([1, 2])
    with suppress(grpc.aio.AioRpcError):
        send(unreleased, stub)
    assert bool(unreleased) is stays
    assert len(stub.calls) == 1
