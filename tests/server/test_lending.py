"""Room moves between tenants: lent while it is free, given back to who is within its guarantee."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvstore import Client
from kvstore.model.block import BlockKey
from kvstore.model.outcome import Reason
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until

MIB = 1 << 20
CAPACITY = 256 * MIB
GUARANTEED = 64 * MIB
NAMESPACE = sample_namespace("lending", MIB)
NO_ROOM_S = 0.5  # to wait with more than fits: no room comes


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    tenants = [f"tenants.{name}.dram.guaranteed=64MiB" for name in ("quiet", "noisy", "other")]
    with Daemon("dram.capacity=256MiB", *tenants, file=False) as daemon:
        yield daemon.start()
        daemon.stop()


def client_of(daemon: Daemon, tenant: str) -> Client:
    client = Client(f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}")
    client.register(NAMESPACE)
    return client


def put(client: Client, keys: list[BlockKey], wait_s: float = 20.0) -> int:
    """Put a prefix, a few blocks at a time."""
    stored = 0
    for at in range(0, len(keys), 8):
        some = keys[at : at + 8]
        parent = keys[at - 1] if at else None
        records = [bytes([index % 251]) * MIB for index in range(at, at + len(some))]
        done = client.put(NAMESPACE.id, some, records, first_block=at, parent=parent, wait_s=wait_s)
        stored += done.committed
    return stored


def held(daemon: Daemon) -> Mapping[str, Any]:
    """Return what each tenant has of DRAM now."""
    with Client(daemon.target, arena=False) as operator:
        stats = operator.admin.stats()
    return {name: each["dram"] for name, each in stats["tenants"].items()}


def test_what_others_leave_is_lent_and_comes_back(daemon: Daemon) -> None:
    flood = sample_keys("flood", 400)
    with client_of(daemon, "noisy") as noisy, client_of(daemon, "quiet") as quiet:
        until(
            lambda: (
                put(noisy, flood, NO_ROOM_S) >= 0
                and held(daemon)["noisy"]["used_bytes"] > 0.9 * CAPACITY
            )
        )

        mine = sample_keys("mine", 56)
        assert put(quiet, mine) == len(mine)
        assert quiet.match(NAMESPACE.id, mine).hit_blocks == len(mine)
        now = held(daemon)
        assert now["quiet"]["evicted_blocks"] == 0
        assert sum(each["reserved_bytes"] for each in now.values()) <= CAPACITY

        until(lambda: "dram/over_share" in noisy.admin.stats()["totals"].get("evicted_blocks", {}))
        told = noisy.admin.explain(NAMESPACE.id, flood)
        assert told.ending is not None
        assert Reason.OVER_SHARE in {each.reason for each in told.ranges}

        put(noisy, sample_keys("more", 200), NO_ROOM_S)
        assert quiet.match(NAMESPACE.id, mine).hit_blocks == len(mine), "it is within its guarantee"
        assert held(daemon)["noisy"]["evicted_blocks"] > 0


def test_two_that_want_more_than_there_is_share_it(daemon: Daemon) -> None:
    with client_of(daemon, "noisy") as noisy, client_of(daemon, "other") as other:
        put(noisy, sample_keys("noisy", 300), NO_ROOM_S)
        for each in range(3):
            put(other, sample_keys(f"other {each}", 100))
            put(noisy, sample_keys(f"noisy {each}", 100))
        until(lambda: _shared(daemon))


def _shared(daemon: Daemon) -> bool:
    now = held(daemon)
    return all(now[name]["used_bytes"] > 0.4 * CAPACITY for name in ("noisy", "other"))
