"""Namespaces come and go: no client has to know, and none keeps another out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from kvstore import AsyncClient, Client, Part, Prefix, Span, UnknownNamespace
from kvstore.decide.namespaces import EMPTY_MIN, NAMESPACES_MAX
from kvstore.model.block import Namespace, NamespaceId
from kvstore.model.checksum import checksum
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

ENGINE = sample_namespace("engine", 4096)
FLOOD = 10_000
AT_ONCE = 64


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One of our own: here, others' namespaces are pushed out."""
    with Daemon(tcp=True) as daemon:
        yield daemon.start()
        daemon.stop()


def for_each(
    daemon: Daemon, numbers: Iterable[int], do: Callable[[AsyncClient, int], Awaitable[object]]
) -> None:
    """Do something with every number, some at once, as one client."""

    async def run() -> None:
        client = AsyncClient(daemon.target, name="one of many")
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with places:
                await do(client, number)

        try:
            await asyncio.gather(*map(one, numbers))
        finally:
            await client.close()

    asyncio.run(run())


def flood(daemon: Daemon, start: int, count: int) -> None:
    """Register namespaces, as a client that makes ever more."""
    for_each(
        daemon,
        range(start, start + count),
        lambda client, number: client.register(sample_namespace(f"flood {number}")),
    )


def put_and_got(client: Client, namespace: Namespace, prefix: str) -> None:
    keys = sample_keys(prefix, 4)
    records = sample_records(keys, namespace.groups[0].record_nbytes)
    namespace_id = client.register(namespace)
    assert client.put(namespace_id, keys, records).committed == 4
    assert client.get(namespace_id, keys) == records
    assert client.match(namespace_id, keys).hit_blocks == 4


def test_a_new_engine_is_served_after_ten_thousand_registrations(daemon: Daemon) -> None:
    with Client(daemon.target, name="old engine") as old:
        kept = sample_namespace("old engine", 4096)
        put_and_got(old, kept, "kept")
        flood(daemon, 0, FLOOD)
        assert old.admin.stats()["namespaces"] == NAMESPACES_MAX
        with Client(daemon.target, name="new engine") as new:
            put_and_got(new, ENGINE, "new")
        assert kept in [use.namespace for use in old.admin.namespaces()], "it has blocks"
        assert old.match(kept.id, sample_keys("kept", 4)).hit_blocks == 4


def epoch(step: int) -> Namespace:
    return replace(ENGINE, identity=(("epoch", str(step)), ("model", "trained")))


@pytest.fixture(scope="module")
def full(daemon: Daemon) -> Daemon:
    """A daemon that a training loop has used which resets at every step: each has blocks."""

    async def step(client: AsyncClient, number: int) -> None:
        keys = sample_keys(f"step {number}", 1)
        namespace_id = await client.register(epoch(number))
        done = await client.put(namespace_id, keys, sample_records(keys, 4096))
        assert done.committed == 1

    for_each(daemon, range(NAMESPACES_MAX + 200), step)
    return daemon


def test_an_engine_that_resets_at_every_step_goes_on(full: Daemon) -> None:
    with Client(full.target) as client:
        last = NAMESPACES_MAX + 199
        client.register(epoch(last))
        assert client.match(epoch(last).id, sample_keys(f"step {last}", 1)).hit_blocks == 1
        with pytest.raises(UnknownNamespace):
            client.match(epoch(0).id, sample_keys("step 0", 1))
        namespace_id = client.register(epoch(0))
        keys = sample_keys("step 0", 1)
        assert client.get(namespace_id, keys) == sample_records(keys, 4096), "its blocks stay"


@pytest.mark.parametrize("local", [True, False], ids=["arena", "stream"])
def test_whoever_was_forgotten_does_not_notice(full: Daemon, local: bool) -> None:
    keys = sample_keys(f"forgotten {local}", 4)
    records = sample_records(keys, 4096)

    def calls(client: Client, namespace_id: NamespaceId) -> Iterator[object]:
        yield client.match(namespace_id, keys)
        yield client.admin.explain(namespace_id, keys)
        yield client.admin.delete(namespace_id, keys)
        yield client.hints.prefetch(Prefix(namespace_id, keys))
        yield client.get(namespace_id, keys)
        if local:
            yield client.release(client.acquire(namespace_id, keys).lease_id)
            spans = [Span(Part(0, 0), 0, 4)]
            grant = client.reserve(namespace_id, keys, first_block=0, parent=None, spans=spans)
            yield client.release(grant.lease_id)
        yield client.put(namespace_id, keys, records)

    with Client(full.target if local else full.address) as client, Client(full.target) as other:
        namespace_id = client.register(sample_namespace(f"forgotten {local}", 4096))
        answers = calls(client, namespace_id)
        for number in range(6 + 2 * local):
            flood(full, (number + 1) * FLOOD, EMPTY_MIN + 1)
            with pytest.raises(UnknownNamespace):
                other.match(namespace_id, keys)
            next(answers)
        assert client.get(namespace_id, keys) == records


def test_a_namespace_with_a_reservation_stays_and_is_committed_into(full: Daemon) -> None:
    keys = sample_keys("reserved", 2)
    with Client(full.target) as client, Client(full.target) as other:
        namespace_id = client.register(sample_namespace("reserved", 4096))
        spans = [Span(Part(0, 0), 0, 2)]
        grant = client.reserve(namespace_id, keys, first_block=0, parent=None, spans=spans)
        flood(full, 200_000, EMPTY_MIN + 1)
        assert other.match(namespace_id, keys).hit_blocks == 0
        sums = [checksum(client.view(slot)) for slot in grant.slots if slot is not None]
        assert client.commit(grant.lease_id, sums).committed == 2
        assert other.match(namespace_id, keys).hit_blocks == 2


def test_a_restarted_daemon_asks_for_what_it_was_not_told() -> None:
    """More namespaces than a client tells a new daemon at once."""
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        specs = [sample_namespace(f"many {number}", 4096) for number in range(20)]
        for each in specs:
            client.register(each)
        before = client.instance
        daemon.kill()
        daemon.start()
        until(lambda: client.available and client.instance != before)
        for number, each in enumerate(specs):
            keys = sample_keys(f"many {number}", 4)
            assert client.match(each.id, keys).hit_blocks == 0
        daemon.stop()
