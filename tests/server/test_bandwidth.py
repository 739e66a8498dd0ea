"""A tenant's bandwidth, over TCP and from its disks: kept, changed live, and no other one's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.model.hint import Prefix
from kvstore.system.bandwidth import BURST_S
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

MIB = 1 << 20
NAMESPACE = sample_namespace(record_nbytes=MIB)
KEYS = sample_keys("bandwidth", 8)
RECORDS = sample_records(KEYS, MIB)
RATE_MIB = 4
SLOW_S = len(KEYS) / RATE_MIB * (1 - BURST_S) / 2  # the last is waited for in part


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(
        "tenants.default.dram.guaranteed=24MiB",
        f"tenants.default.bandwidth.tcp={RATE_MIB}MiB",
        "tenants.slow.dram.guaranteed=16MiB",
        f"tenants.slow.bandwidth.file_read={RATE_MIB}MiB",
        "tenants.fast.dram.guaranteed=16MiB",
        tcp=True,
    ) as daemon:
        yield daemon.start()
        daemon.stop()


def get_s(client: Client) -> float:
    began = time.monotonic()
    assert client.get(NAMESPACE.id, KEYS) == RECORDS
    return time.monotonic() - began


def test_streams_of_a_tenant_keep_to_its_bandwidth(daemon: Daemon) -> None:
    with (
        Client(daemon.address, timeout_s=30.0) as client,
        Client(daemon.target, arena=False) as operator,
    ):
        client.register(NAMESPACE)
        began = time.monotonic()
        assert client.put(NAMESPACE.id, KEYS, RECORDS).committed == len(KEYS)
        assert time.monotonic() - began > SLOW_S
        slow_s = get_s(client)
        assert slow_s > SLOW_S
        operator.admin.configure(["tenants.default.bandwidth.tcp=0"])
        assert get_s(client) < slow_s / 2


def read_s(daemon: Daemon, tenant: str) -> float:
    """Store all records, let DRAM lose them, and read them; return the seconds that took."""
    with Client(f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}") as client:
        client.register(NAMESPACE)
        assert client.put(NAMESPACE.id, KEYS, RECORDS, durable=True).durable
        client.hints.demote(Prefix(NAMESPACE.id, tuple(KEYS)))
        began = time.monotonic()
        grant = client.acquire(NAMESPACE.id, KEYS, wait_s=30.0)
        assert grant.hit_blocks == len(KEYS)
        return time.monotonic() - began


def test_reads_of_a_tenants_files_keep_to_its_bandwidth(daemon: Daemon) -> None:
    slow_s, fast_s = read_s(daemon, "slow"), read_s(daemon, "fast")
    assert slow_s > SLOW_S
    assert fast_s < slow_s


def test_a_tenant_over_its_bandwidth_has_no_failing_disk(daemon: Daemon) -> None:
    with Client(f"unix:{daemon.socket.parent / 'slow' / 'kvstore.sock'}") as client:
        client.register(NAMESPACE)
        assert client.put(NAMESPACE.id, KEYS, RECORDS, durable=True).durable
        for _ in range(4):  # what is asked for first uses up the rate of some seconds
            client.hints.demote(Prefix(NAMESPACE.id, tuple(KEYS)))
            client.acquire(NAMESPACE.id, KEYS, wait_s=0.01)
        outcome = client.acquire(NAMESPACE.id, KEYS, wait_s=0.01, request_id="refused")
        assert outcome.hit_blocks < len(KEYS)
        assert client.admin.stats()["file"]["failed_reads"] == 0
