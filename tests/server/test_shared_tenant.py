"""A shared tenant: every tenant reads its blocks, and only its own engines write them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import BlockKey, Client, Part, Span
from kvstore.daemon import wire_store
from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest, KVStoreError
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.identity import CALLER, UNIX_SOCKET
from kvstore.server.recorder import Recorder
from kvstore.server.service import Service
from kvstore.server.shared import GUEST, SharingService
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.settings import load_settings
from kvstore.store.live_settings import LiveSettings
from kvstore.store.tenants import Tenant, Tenants
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.messages import Epoch

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
    client = Client(target_of(daemon, tenant))
    client.register(NAMESPACE)
    return client


def target_of(daemon: Daemon, tenant: str) -> str:
    return f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}"


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


def test_its_operator_sees_of_a_readers_prompt_what_was_found_and_no_more(daemon: Daemon) -> None:
    """Not how long it was, nor a key that is not there, nor what the reader has itself."""
    prompt = [*KEYS[:8], *sample_keys("private", 5)]

    with client_of(daemon, "beta") as beta, client_of(daemon, "public") as public:
        seen: list[pb.Answered] = []

        async def watch(remote: Any) -> None:
            async for reply in remote.admin.monitor():
                seen.extend(reply.answered)
                if any(each.outcome.client == GUEST for each in seen):
                    return

        watching = public.submit(watch)
        public.admin.slow(reset=True)
        asked, found = _counted(public)
        until(lambda: _read(daemon, beta, prompt) and bool(seen))
        watching.result(10)
        outcomes = [each for each in public.admin.outcomes("") if each.client == GUEST]
        assert outcomes
        assert {each.last_key for each in outcomes} == {KEYS[7]}
        assert {(e.asked_blocks, e.skip_blocks, e.ending) for e in outcomes} == {(8, 0, None)}
        guests = [each.outcome for each in seen if each.outcome.client == GUEST]
        assert {(each.asked_blocks, each.last_key) for each in guests} == {(8, KEYS[7])}
        slow = [each for each in public.admin.slow().items if each.kind == "acquire"]
        assert slow
        assert all(each.blocks <= 8 for each in slow), slow
        asked_now, found_now = _counted(public)
        assert asked_now - asked == found_now - found > 0


def _read(daemon: Daemon, reader: Client, prompt: list[BlockKey]) -> bool:
    """Read a prompt in each way that there is, of which the reader has two blocks already."""
    parts = [Span(Part(0, 0), 0, len(prompt))]
    for grant in (
        reader.acquire(NAMESPACE.id, prompt, skip_blocks=2),
        reader.acquire(NAMESPACE.id, prompt, spans=parts),
    ):
        reader.release(grant.lease_id)
    with Client(target_of(daemon, "beta"), arena=False) as stream:
        stream.register(NAMESPACE)
        return stream.get(NAMESPACE.id, prompt)[7:9] == [RECORDS[7], None]


def _counted(client: Client) -> tuple[int, int]:
    """Return how many blocks were asked for, and found."""
    (use,) = (each for each in client.admin.namespaces() if each.namespace_id == NAMESPACE.id)
    return use.asked_blocks, use.hit_blocks


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


@pytest.mark.parametrize("span", [(9, 9, 0, 8), (0, 0, 8, 2), (0, 0, 0, 4_000_000_000)])
def test_parts_that_there_are_not_are_a_mistake_of_the_reader(
    daemon: Daemon, span: tuple[int, int, int, int]
) -> None:
    group, shard, begin, end = span
    with client_of(daemon, "beta") as beta:
        with pytest.raises(InvalidRequest):
            beta.acquire(NAMESPACE.id, KEYS[:8], spans=[Span(Part(group, shard), begin, end)])
        assert _acquired(beta)


def test_leases_of_a_reader_that_is_gone_end(daemon: Daemon) -> None:
    with client_of(daemon, "public") as public:
        with client_of(daemon, "beta") as beta:
            beta.acquire(NAMESPACE.id, KEYS)
            assert public.admin.stats()["leases"] >= 1
        until(lambda: public.admin.stats()["leases"] == 0)


def test_streams_read_the_shared_blocks_too(daemon: Daemon) -> None:
    with Client(target_of(daemon, "acme"), arena=False) as reader:
        reader.register(NAMESPACE)
        assert reader.get(NAMESPACE.id, KEYS[:8]) == RECORDS[:8]


class _Call:
    """What a method asks of its call."""

    def time_remaining(self) -> float:
        return 10.0

    def peer(self) -> str:
        return "unix:"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """It is not cut off."""


def test_a_session_that_ends_while_other_hosts_are_asked_leaves_no_guest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load_settings(None, ["file.path=", *SETTINGS[:2], *SETTINGS[6:8]])

    async def main() -> None:
        tenants = Tenants(settings, wire_store, Metrics())
        config = LiveSettings(settings, tenants)

        async def never(*given: Any) -> Any:
            raise AssertionError("a tenant was served")

        def service_of(tenant: Tenant, kind: type[Service]) -> Any:
            return kind(
                tenant.store, Epoch("test", 1), tenant.metrics, arena_socket="", call_socket="",
                version="", recorder=Recorder(tenant.metrics), config=config,
                admin=TenantAdmin(tenants, config, never, never), addresses=dict,
            )  # fmt: skip

        await tenants.start()
        public, acme = tenants.get("public"), tenants.get("acme")
        service = service_of(acme, SharingService)
        service.share(public.store, service_of(public, Service), lambda: 2)
        acme.store.namespaces.register(NAMESPACE)
        session = acme.store.sessions.open("t" * 16, "engine")
        process = acme.store.sessions.join(session, "t" * 16)

        async def ends(*given: Any, **named: Any) -> int:
            acme.store.sessions.leave(process)
            return len(KEYS)

        monkeypatch.setattr(public.store, "elsewhere", ends)
        asked = pb.AcquireRequest(
            session=session, namespace_id=NAMESPACE.id, keys=b"".join(KEYS), wait_s=0.1
        )
        CALLER.set(UNIX_SOCKET)
        try:
            assert not (await service.Acquire(asked, _Call())).hit_blocks
        except KVStoreError as error:
            pytest.fail(str(error))
        assert not acme.store.sessions.processes(session)
        assert not service._guests
        await tenants.close(0.0)

    asyncio.run(main())
