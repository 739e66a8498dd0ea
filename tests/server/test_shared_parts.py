"""What one tenant's readers may take of the shared tenant, however they read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc.aio
import pytest

from kvstore import AsyncClient, Client
from kvstore.model.block import Grant
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.stream_bounds import STALL_S, STREAMS_MAX
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.server.every_method import OPTIONS

MIB = 1 << 20
NAMESPACE = sample_namespace("parts", MIB)
KEYS = sample_keys("parts", 8)
RECORDS = sample_records(KEYS, MIB)
RATE_MIB = 4
COPIED_MIB = 4  # of what a tenant's readers may lease: the third part of half of 24 MiB
SLOW_S = len(KEYS) / RATE_MIB / 2
SETTINGS = (
    "tenants.public.dram.guaranteed=24MiB",
    "tenants.public.file.guaranteed=64MiB",
    "tenants.public.arena=sealed",
    "tenants.public.shared=true",
    "tenants.acme.dram.guaranteed=8MiB",
    "tenants.beta.dram.guaranteed=8MiB",
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(*SETTINGS) as daemon:
        yield daemon.start()
        daemon.stop()


def target_of(daemon: Daemon, tenant: str) -> str:
    return f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}"


def client_of(daemon: Daemon, tenant: str, *, arena: bool = True) -> Client:
    client = Client(target_of(daemon, tenant), arena=arena, timeout_s=30.0)
    client.register(NAMESPACE)
    return client


def store(daemon: Daemon, *prefixes: str) -> None:
    with client_of(daemon, "public") as public:
        for name in prefixes:
            keys = KEYS if name == "parts" else sample_keys(name, 4)
            records = sample_records(keys, MIB)
            assert public.put(NAMESPACE.id, keys, records, durable=True).durable


def acquiring(name: str) -> Callable[[AsyncClient], Coroutine[Any, Any, Grant]]:
    return lambda remote: remote.acquire(NAMESPACE.id, sample_keys(name, 4), wait_s=10.0)


def test_streams_that_one_tenant_does_not_read_take_no_place_of_others(daemon: Daemon) -> None:
    store(daemon, "parts")

    async def read_nothing() -> None:
        async with grpc.aio.insecure_channel(target_of(daemon, "acme"), options=OPTIONS) as channel:
            stub = rpc.KVStoreStub(channel)
            request = pb.GetRequest(namespace_id=NAMESPACE.id, keys=b"".join(KEYS))
            gets = [stub.Get(request, timeout=60) for _ in range(STREAMS_MAX + 8)]
            headers: list[asyncio.Task[Any]] = [asyncio.create_task(get.read()) for get in gets]
            while len([each for each in headers if each.done()]) < COPIED_MIB:
                await asyncio.wait(
                    [each for each in headers if not each.done()],
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=10,
                )
            assert all(each.result().header.found == [True] for each in headers if each.done())
            await asyncio.to_thread(read_all)
            for get in gets:
                get.cancel()

    def read_all() -> None:
        began = time.monotonic()
        with client_of(daemon, "beta", arena=False) as beta:
            assert beta.get(NAMESPACE.id, KEYS) == RECORDS
        with client_of(daemon, "public", arena=False) as public:
            assert public.get(NAMESPACE.id, KEYS) == RECORDS
        assert time.monotonic() - began < STALL_S / 2  # before those that stand still are gone

    with client_of(daemon, "acme"), client_of(daemon, "beta"):
        asyncio.run(read_nothing())


def test_what_a_reader_streams_goes_over_its_own_lane(daemon: Daemon) -> None:
    store(daemon, "parts")

    def took_s() -> float:
        with client_of(daemon, "acme", arena=False) as acme:
            began = time.monotonic()
            assert acme.get(NAMESPACE.id, KEYS) == RECORDS
            return time.monotonic() - began

    assert took_s() < SLOW_S
    with Client(daemon.target, arena=False) as operator:
        operator.admin.configure([f"tenants.acme.bandwidth.tcp={RATE_MIB}MiB"])
    assert took_s() > SLOW_S


def test_prefixes_that_come_up_at_once_keep_to_the_readers_part(daemon: Daemon) -> None:
    """Of 12 MiB that may be leased, each of three tenants may have 4: one prefix, if none is
    leased yet."""
    prefixes = [f"cold {number}" for number in range(4)]
    store(daemon, *prefixes)
    daemon.stop()
    daemon.start()
    with client_of(daemon, "acme") as acme, client_of(daemon, "beta") as beta:
        grants = [acme.submit(acquiring(name)) for name in prefixes]
        found = [grant.result(30) for grant in grants]
        assert sorted(grant.hit_blocks for grant in found) == [0, 0, 0, 4]
        other = beta.acquire(NAMESPACE.id, sample_keys(prefixes[0], 4), wait_s=10.0)
        assert other.hit_blocks == 4
        for grant in found:
            acme.release(grant.lease_id)
        assert acme.acquire(NAMESPACE.id, sample_keys(prefixes[3], 4), wait_s=10.0).hit_blocks == 4
