"""A get whose copies are verified does not wait for the answer to its release; others do."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore import AsyncClient, BlockKey, Client
from kvstore.client.calls import CallStub
from kvstore.client.in_place import RELEASES_MAX
from kvstore.client.session import Session
from kvstore.model.block import NamespaceId
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES, sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.call_wire import METHODS, Frame, Kind

Work = Callable[[AsyncClient, NamespaceId, list[BlockKey]], Awaitable[None]]
release = Session.release


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until it is set, no release is sent."""
    may_go = asyncio.Event()

    async def late(session: Session, *lease_ids: int) -> list[bool]:
        await may_go.wait()
        return await release(session, *lease_ids)

    monkeypatch.setattr(Session, "release", late)
    return may_go


def run(daemon: Daemon, name: str, work: Work) -> None:
    async def go() -> None:
        keys = sample_keys(name, 3)
        client = AsyncClient(daemon.target)
        try:
            namespace_id = await client.register(sample_namespace())
            await client.put(namespace_id, keys, sample_records(keys))
            async with asyncio.timeout(20):
                await work(client, namespace_id, keys)
        finally:
            await client.close()

    asyncio.run(go())


async def leases(client: AsyncClient) -> int:
    return int((await client.admin.stats())["leases"])


async def all_released(client: AsyncClient) -> None:
    while await leases(client):  # noqa: ASYNC110 - the daemon is another process
        await asyncio.sleep(0.01)


async def over(session: Session, *lease_ids: int) -> list[bool]:
    """Release, and say that the lease was over before."""
    return [False for _ in await release(session, *lease_ids)]


def targets() -> list[memoryview]:
    return [memoryview(bytearray(RECORD_NBYTES)) for _ in range(3)]


def test_a_verified_get_returns_before_its_release_is_answered(
    daemon: Daemon, answered: asyncio.Event
) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId, keys: list[BlockKey]) -> None:
        views = targets()
        assert all(await client.get_into(namespace_id, keys, views))
        assert [bytes(view) for view in views] == sample_records(keys)
        assert await leases(client) == 1
        answered.set()
        await all_released(client)

    run(daemon, "late", work)


def test_at_most_so_many_releases_are_on_their_way(daemon: Daemon, answered: asyncio.Event) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId, keys: list[BlockKey]) -> None:
        for _ in range(RELEASES_MAX):
            assert await client.get(namespace_id, keys) == sample_records(keys)
        one_more = asyncio.create_task(client.get(namespace_id, keys))
        assert not (await asyncio.wait([one_more], timeout=0.3))[0]
        answered.set()
        assert await one_more == sample_records(keys)
        await all_released(client)

    run(daemon, "bounded", work)


def test_a_get_that_verifies_nothing_goes_by_its_release(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId, keys: list[BlockKey]) -> None:
        assert all(await client.get_into(namespace_id, keys, targets()))
        monkeypatch.setattr(Session, "release", over)
        assert not any(await client.get_into(namespace_id, keys, targets(), verify=False))
        assert all(await client.get_into(namespace_id, keys, targets()))

    run(daemon, "unverified", work)


def test_a_wrong_copy_under_a_lease_that_is_over_accuses_nobody(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot may have been another record's already."""

    async def work(client: AsyncClient, namespace_id: NamespaceId, keys: list[BlockKey]) -> None:
        assert await client.admin.flush()  # what is being written is judged on its way
        grant = await client.acquire(namespace_id, keys)
        slot = grant.slots[1]
        assert slot is not None
        client.view(slot)[:1] = b"\xff"
        await client.release(grant.lease_id)
        monkeypatch.setattr(Session, "release", over)
        assert await client.get(namespace_id, keys) == [None] * 3
        monkeypatch.setattr(Session, "release", release)
        found = await client.get(namespace_id, keys)
        assert found == [sample_records(keys)[0], None, sample_records(keys)[2]]

    run(daemon, "accused", work)


def test_pieces_lease_no_more_than_a_window_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next piece is leased when the release of the last one is on its way already."""
    leased, most = 0, 0
    call = CallStub._call

    async def counted(stub: CallStub, number: int, *args: Any, **options: Any) -> Any:
        nonlocal leased, most
        leased += {"Acquire": 1, "Release": -1}.get(METHODS[number].name, 0)
        most = max(most, leased)
        return await call(stub, number, *args, **options)

    monkeypatch.setattr(CallStub, "_call", counted)
    namespace = sample_namespace("pieces", 1 << 20)
    keys = sample_keys("pieces", 40)  # five pieces: half of a window, a quarter of the arena, each
    with Daemon("dram.capacity=64MiB", file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            client.register(namespace)
            until(lambda: client.admin.stats()["dram"]["reserved_bytes"] >= 64 << 20)
            client.put(namespace.id, keys, sample_records(keys, 1 << 20))
            most = 0
            views = [memoryview(bytearray(1 << 20)) for _ in keys]
            assert all(client.get_into(namespace.id, keys, views))
    assert [bytes(view) for view in views] == sample_records(keys, 1 << 20)
    assert most == 2


@pytest.mark.parametrize("readers", [1, 3])
def test_a_lease_that_comes_in_the_turn_of_the_cancellation_is_given_back(readers: int) -> None:
    """The task that is cancelled has not run yet, and its call is not abandoned yet."""
    sent: list[Frame] = []

    async def work() -> None:
        stub = CallStub(None)
        stub._link = cast("Any", SimpleNamespace(open=True, clogged=False, send=sent.append))
        request = pb.AcquireRequest(session=5, readers=readers)
        asking = asyncio.create_task(stub.Acquire(request, timeout=5.0))
        await asyncio.sleep(0)
        asking.cancel()
        stub._take(Frame(Kind.REPLY, sent[0].id, pb.GrantReply(lease=77).SerializeToString()))
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert [stub._early, stub._abandoned, stub._waiting] == [{}, {}, {}]

    asyncio.run(work())
    released = [frame for frame in sent if METHODS[frame.method].name == "Release"]
    assert [pb.ReleaseRequest.FromString(frame.body).leases for frame in released] == [
        [77] * readers
    ]
