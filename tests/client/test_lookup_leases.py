"""A lookup leases what it finds, for the load that follows; what nobody loads is given back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, BlockKey, InvalidRequest, Part, Span, Unavailable
from kvstore.client.lookup_lease import Lookup, LookupLease, LookupLeases, leading
from kvstore.client.page_counters import Counters
from kvstore.client.pages import Limits, Pages, Place
from kvstore.client.pieces import Memory
from kvstore.client.session import Session
from kvstore.model.block import NamespaceId
from kvstore.testing.daemon import Daemon, restarted_with
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

Work = Callable[[AsyncClient, NamespaceId], Awaitable[None]]
NBYTES = 1 << 16  # whole pages
SPACE = sample_namespace("lookups", NBYTES)
ARENA_RECORDS = 64


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    nbytes = ARENA_RECORDS * NBYTES
    with Daemon(f"dram.capacity={nbytes}", f"dram.extent={nbytes}", "limits.lease_s=20") as daemon:
        yield daemon.start()
        daemon.stop()


def run(daemon: Daemon, work: Work, *, arena: bool = True) -> None:
    async def go() -> None:
        client = AsyncClient(daemon.target, arena=arena)
        try:
            async with asyncio.timeout(30):
                await work(client, await client.register(SPACE))
        finally:
            await client.close()

    asyncio.run(go())


def memory(count: int) -> list[memoryview]:
    """Return targets of whole pages."""
    pages = np.zeros(count * NBYTES + 4096, np.uint8)
    begin = -pages.ctypes.data % 4096
    view = memoryview(pages)[begin:]
    return [view[at * NBYTES : (at + 1) * NBYTES] for at in range(count)]


async def stats(client: AsyncClient) -> dict[str, Any]:
    return await client.admin.stats()


async def leases(client: AsyncClient) -> int:
    return int((await stats(client))["leases"])


async def all_released(client: AsyncClient, but: int = 0) -> None:
    while await leases(client) > but:  # noqa: ASYNC110 - the daemon is another process
        await asyncio.sleep(0.01)


def leased(lookup: Lookup) -> LookupLease:
    assert lookup.lease is not None
    return lookup.lease


async def put(client: AsyncClient, keys: list[BlockKey]) -> list[bytes]:
    records = sample_records(keys, NBYTES)
    await client.put(SPACE.id, keys, records)
    return records


def test_a_load_takes_what_its_lookup_leased(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquired = []
    acquire = Session.acquire

    async def counted(session: Session, *args: Any, **options: Any) -> Any:
        acquired.append(len(args[1]))
        return await acquire(session, *args, **options)

    monkeypatch.setattr(Session, "acquire", counted)

    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("taken", 8)
        records = await put(client, keys)
        lookup = await client.look_up(namespace_id, keys)
        assert lookup.present == [True] * 8
        assert list(leased(lookup).keys) == keys
        assert await leases(client) == 1
        await put(client, sample_keys("pressure", 2 * ARENA_RECORDS))
        targets = memory(8)
        assert all(await client.get_into(namespace_id, keys, targets, lease=lookup.lease))
        assert [bytes(each) for each in targets] == records
        assert acquired == [8]
        await all_released(client)

    run(daemon, work)


def test_a_load_of_more_leases_the_rest_and_one_of_less_takes_a_part(daemon: Daemon) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("parts", 8)
        records = await put(client, keys)
        for looked_up, loaded in ((3, 8), (8, 3)):
            lookup = await client.look_up(namespace_id, keys[:looked_up])
            targets = memory(loaded)
            good = await client.get_into(namespace_id, keys[:loaded], targets, lease=lookup.lease)
            assert good == [True] * loaded
            assert [bytes(each) for each in targets] == records[:loaded]
        await all_released(client)

    run(daemon, work)


def test_presence_is_said_of_all_and_only_the_first_ones_are_leased(daemon: Daemon) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("gaps", 12)
        stored = [*range(4), 6, 7, 11]
        for at in stored:
            await put(client, [keys[at]])
        lookup = await client.look_up(namespace_id, keys)
        assert [at for at, there in enumerate(lookup.present) if there] == stored
        assert list(leased(lookup).keys) == keys[:4]
        await client.give_back(leased(lookup))
        await all_released(client)
        nothing = await client.acquire(
            namespace_id, keys[4:6], spans=[Span(Part(0, 0), 0, 2)], each=True
        )
        assert (nothing.leased, nothing.lease_id, nothing.present) == (False, 0, (False, False))
        assert await client.look_up(namespace_id, keys[4:6]) == Lookup([False, False], None)
        later = await client.look_up(namespace_id, keys[5:8])
        assert later == Lookup([False, True, True], None)
        await all_released(client)

    run(daemon, work)


def test_all_lookups_together_lease_a_quarter_of_the_arena(daemon: Daemon) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("quarter", ARENA_RECORDS // 2)
        await put(client, keys)
        most = ARENA_RECORDS // 4
        first = await client.look_up(namespace_id, keys)
        assert first.present == [True] * len(keys)
        assert list(leased(first).keys) == keys[:most]
        second = await client.look_up(namespace_id, keys)
        assert second == Lookup([True] * len(keys), None)
        await client.give_back(leased(first))
        third = await client.look_up(namespace_id, keys)
        assert list(leased(third).keys) == keys[:most]
        targets = memory(len(keys))
        assert all(await client.get_into(namespace_id, keys, targets, lease=third.lease))
        await all_released(client)

    run(daemon, work)


def test_a_lookup_that_fails_half_way_keeps_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("no answer")

    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("half way", ARENA_RECORDS // 2)
        await put(client, keys)
        with monkeypatch.context() as patched:
            patched.setattr(Session, "match", away)
            with pytest.raises(Unavailable):
                await client.look_up(namespace_id, keys)
        await all_released(client)
        lookup = await client.look_up(namespace_id, keys)
        assert len(leased(lookup).keys) == ARENA_RECORDS // 4

    run(daemon, work)


def test_a_load_with_targets_that_do_not_fit_ends_the_lease(daemon: Daemon) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("unfit", 4)
        await put(client, keys)
        lookup = await client.look_up(namespace_id, keys)
        with pytest.raises(InvalidRequest, match="3 records for 4 keys"):
            await client.get_into(namespace_id, keys, memory(3), lease=lookup.lease)
        await all_released(client)
        assert leased(await client.look_up(namespace_id, keys))

    run(daemon, work)


def test_a_lease_of_other_blocks_is_given_back(daemon: Daemon) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys, others = sample_keys("these", 4), sample_keys("those", 4)
        await put(client, keys)
        records = await put(client, others)
        lookup = await client.look_up(namespace_id, keys)
        targets = memory(4)
        assert all(await client.get_into(namespace_id, others, targets, lease=lookup.lease))
        assert [bytes(each) for each in targets] == records
        await all_released(client)

    run(daemon, work)


def test_a_lease_of_a_daemon_that_died_is_not_used() -> None:
    keys = sample_keys("died", 4)
    records = sample_records(keys, NBYTES)
    with restarted_with(SPACE, keys, records) as daemon:

        async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
            assert all(await client.get(namespace_id, keys))  # into the arena
            lookup = await client.look_up(namespace_id, keys)
            assert any(leased(lookup).grant.slots)
            daemon.kill()
            await asyncio.to_thread(daemon.start)
            while not client.available:  # noqa: ASYNC110 - the daemon is another process
                await asyncio.sleep(0.01)
            await put(client, sample_keys("where they were", ARENA_RECORDS // 2))
            targets = memory(4)
            assert all(await client.get_into(namespace_id, keys, targets, lease=lookup.lease))
            assert [bytes(each) for each in targets] == records
            assert client.corrupt_blocks == 0

        run(daemon, work)


def test_what_lies_in_files_is_leased_and_read_there() -> None:
    keys = sample_keys("in files", 6)
    records = sample_records(keys, NBYTES)
    with restarted_with(SPACE, keys, records) as daemon:

        async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
            lookup = await client.look_up(namespace_id, keys, from_files=True)
            assert lookup.present == [True] * 6
            assert all(leased(lookup).grant.places)
            targets = memory(6)
            good = await client.get_into(
                namespace_id, keys, targets, from_files=True, lease=lookup.lease
            )
            assert good == [True] * 6
            assert [bytes(each) for each in targets] == records
            await all_released(client)
            assert (await stats(client))["dram"]["blocks"] == 0
            # Places are of no use to a load that does not read files.
            lookup = await client.look_up(namespace_id, keys, from_files=True)
            assert all(await client.get_into(namespace_id, keys, memory(6), lease=lookup.lease))
            await all_released(client)

        run(daemon, work)


def test_over_a_stream_nothing_is_leased(daemon: Daemon) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("stream", 4)
        await put(client, keys[:3])
        assert await client.look_up(namespace_id, keys) == Lookup([True] * 3 + [False], None)

    run(daemon, work, arena=False)


def test_an_acquire_says_of_each_record_whether_it_is_stored_only_with_spans(
    daemon: Daemon,
) -> None:
    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("each", 3)
        await put(client, keys[1:])
        grant = await client.acquire(namespace_id, keys, spans=[Span(Part(0, 0), 0, 3)], each=True)
        assert grant.present == (False, True, True)
        await client.release(grant.lease_id)
        with pytest.raises(InvalidRequest, match="spans"):
            await client.acquire(namespace_id, keys, each=True)
        assert await leases(client) == 0

    run(daemon, work)


# ---- what an engine's connector does with them -------------------------------------------------


def pages_of() -> Pages:
    return Pages(Limits(1.0, 5.0, 5.0, NBYTES), Counters())


def test_pages_are_leased_from_their_lookup_to_their_load(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.lookup_lease.KEEP_S", 60.0)

    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("pages", 5)
        records = await put(client, keys)
        pages, places = pages_of(), [Place(SPACE, key) for key in keys]
        for _ in range(2):  # a lookup of the same once more does not add up
            assert await pages.exist(client, places) == [True] * 5
            await all_released(client, but=1)
        assert await leases(client) == 1
        targets: list[Memory] = [*memory(5)]
        assert await pages.load(client, places, targets) == [True] * 5
        assert [bytes(each) for each in targets if isinstance(each, memoryview)] == records
        await all_released(client)

    run(daemon, work)


def test_what_nobody_loads_is_given_back(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.lookup_lease.KEEP_S", 0.3)

    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("unloaded", 5)
        await put(client, keys)
        assert all(await pages_of().exist(client, [Place(SPACE, key) for key in keys]))
        assert await leases(client) == 1
        await all_released(client)
        assert leased(await client.look_up(namespace_id, keys)).nbytes == 5 * NBYTES

    run(daemon, work)


def test_so_many_lookups_are_kept_and_no_more(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.lookup_lease.KEEP_S", 60.0)
    monkeypatch.setattr("kvstore.client.lookup_lease.LEASES_MAX", 3)

    async def work(client: AsyncClient, namespace_id: NamespaceId) -> None:
        keys = sample_keys("many", 6)
        await put(client, keys)
        kept = LookupLeases()
        for key in keys:
            kept.keep(client, leased(await client.look_up(namespace_id, [key])))
        await all_released(client, but=3)
        found = [kept.take(namespace_id, [key]) is not None for key in keys]
        assert found == [False, False, False, True, True, True]
        assert kept.take(namespace_id, keys[-1:]) is None

    run(daemon, work)


def test_leading_counts_up_to_the_first_gap() -> None:
    assert leading([]) == 0
    assert leading([False, True]) == 0
    assert leading([True, True, False, True]) == 2
    assert leading([True]) == 1
