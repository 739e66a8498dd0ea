"""A shared tenant: every tenant reads its blocks, and only its own engines write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

MIB = 1 << 20
NAMESPACE = sample_namespace()
KEYS = sample_keys("shared", 12)
RECORDS = sample_records(KEYS)
SETTINGS = (
    *(f"tenants.{name}.dram.guaranteed=16MiB" for name in ("public", "acme", "beta")),
    *(f"tenants.{name}.file.guaranteed=64MiB" for name in ("public", "acme", "beta")),
    "tenants.public.arena=sealed",
    "tenants.public.shared=true",
    "tenants.beta.arena=sealed",
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*SETTINGS) as daemon:
        with client_of(daemon.start(), "public") as public:
            assert public.put(NAMESPACE.id, KEYS[:8], RECORDS[:8], durable=True).committed == 8
            yield daemon
        daemon.stop()


def client_of(daemon: Daemon, tenant: str) -> Client:
    client = Client(f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}")
    client.register(NAMESPACE)
    return client


@pytest.mark.parametrize("tenant", ["acme", "beta"])
def test_every_tenant_reads_in_place_and_cannot_write(daemon: Daemon, tenant: str) -> None:
    with client_of(daemon, tenant) as reader:
        assert reader.match(NAMESPACE.id, KEYS).hit_blocks == 8
        grant = reader.acquire(NAMESPACE.id, KEYS, request_id="secret", session_id="mine")
        assert grant.hit_blocks == 8
        views = [reader.view(slot) for slot in grant.slots if slot is not None]
        assert [bytes(view) for view in views] == RECORDS[:8]
        assert all(view.readonly for view in views)
        assert reader.release(grant.lease_id)
        assert reader.get(NAMESPACE.id, KEYS[:8]) == RECORDS[:8]
        assert reader.admin.stats()["blocks"] == 0


def test_the_longer_of_own_and_shared_prefix_is_taken(daemon: Daemon) -> None:
    with client_of(daemon, "acme") as acme:
        assert acme.put(NAMESPACE.id, KEYS, RECORDS).committed == 12
        assert acme.match(NAMESPACE.id, KEYS).hit_blocks == 12
        grant = acme.acquire(NAMESPACE.id, KEYS)
        assert grant.hit_blocks == 12
        assert acme.view(grant.slots[0]).readonly is False  # type: ignore[arg-type]
        assert acme.release(grant.lease_id)
        assert acme.admin.clear() == 12
        assert acme.acquire(NAMESPACE.id, KEYS).hit_blocks == 8


def test_what_one_reader_stores_stays_its_own(daemon: Daemon) -> None:
    keys = sample_keys("own", 4)
    with client_of(daemon, "acme") as acme, client_of(daemon, "beta") as beta:
        assert acme.put(NAMESPACE.id, keys, sample_records(keys)).committed == 4
        assert beta.match(NAMESPACE.id, keys).hit_blocks == 0
        with client_of(daemon, "public") as public:
            assert public.match(NAMESPACE.id, keys).hit_blocks == 0


def test_readers_tell_the_shared_tenant_nothing_of_themselves(daemon: Daemon) -> None:
    with client_of(daemon, "beta") as beta, client_of(daemon, "public") as public:
        lease = beta.acquire(NAMESPACE.id, KEYS, request_id="secret-request").lease_id
        assert public.admin.outcomes("secret") == []
        assert all("beta" not in each["name"] for each in public.admin.stats()["clients"])
        beta.release(lease)


def test_who_records_at_the_shared_tenant_sees_no_key_that_it_does_not_have(
    daemon: Daemon,
) -> None:
    with client_of(daemon, "beta") as beta, client_of(daemon, "public") as public:
        told: list[bytes] = []

        async def record(remote: Any) -> None:
            async for batch in remote.admin.record():
                told.extend(each.keys for each in batch.lookups)
                if told:
                    return

        recording = public.submit(record)
        until(lambda: _acquired(beta) and bool(told))
        recording.result(10)
        assert set(told) == {b"".join(KEYS[:8])}


def _acquired(client: Client) -> bool:
    grant = client.acquire(NAMESPACE.id, KEYS)
    return client.release(grant.lease_id)


def test_one_tenants_readers_cannot_take_all_leases_of_the_shared_tenant(daemon: Daemon) -> None:
    keys = sample_keys("large", 2)
    large = sample_namespace("large", MIB)
    with (
        client_of(daemon, "public") as public,
        client_of(daemon, "acme") as acme,
        client_of(daemon, "beta") as beta,
    ):
        for client in (public, acme, beta):
            client.register(large)
        public.put(large.id, keys, [bytes(MIB)] * 2)
        grants = [acme.acquire(large.id, keys) for _ in range(4)]
        assert [each.hit_blocks for each in grants] == [2, 2, 0, 0]
        assert beta.acquire(large.id, keys).hit_blocks == 2
        for each in grants:
            acme.release(each.lease_id)
        assert acme.acquire(large.id, keys).hit_blocks == 2


def test_leases_of_a_reader_that_is_gone_end(daemon: Daemon) -> None:
    with client_of(daemon, "public") as public:
        with client_of(daemon, "beta") as beta:
            beta.acquire(NAMESPACE.id, KEYS)
            assert public.admin.stats()["leases"] >= 1
        until(lambda: public.admin.stats()["leases"] == 0)


def test_streams_read_the_shared_blocks_too(daemon: Daemon) -> None:
    target = f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}"
    with Client(target, arena=False) as reader:
        reader.register(NAMESPACE)
        assert reader.get(NAMESPACE.id, KEYS[:8]) == RECORDS[:8]
