"""What tenants have of the bucket and of the writes of a day: a share, and what others leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Client
from kvstore.decide.policy import SpareWrites
from kvstore.model.errors import ConfigError
from kvstore.settings import Settings, TenantSettings, load_settings
from kvstore.store.tenant_shares import object_share, write_max, write_share
from kvstore.store.tenants import settings_of_tenant
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.store.node import FULL, Node, chain
from tests.store.node import RECORD as NODE_RECORD

GIB = 1 << 30
RECORD = 64 << 10
NAMESPACE = sample_namespace("shares", RECORD)
BLOCKS = 100
HALF_HOUR_BLOCKS = 40  # which may be overdrawn
HALF_HOURS = 48
NAMES = ("acme", "beta")
TENANTS = (
    *(f"tenants.{name}.dram.guaranteed=16MiB" for name in NAMES),
    *(f"tenants.{name}.file.guaranteed=64MiB" for name in NAMES),
)


def settings_with(*overrides: str) -> Settings:
    bucket = ("file.path=/tmp/a", "object.url=s3://bucket/kv", "object.capacity=100GiB")
    return load_settings(None, [*bucket, *TENANTS, *overrides])


def objects(*overrides: str) -> list[float]:
    """Return what each tenant may have of 100 GiB in the bucket, in GiB."""
    settings = settings_with(*overrides)
    owns = [settings_of_tenant(settings, each) for each in settings.tenants]
    return [round(own.object.capacity_bytes / GIB, 3) for own in owns]


def writes(*overrides: str) -> list[float]:
    """Return what may be written a day for each tenant, in GiB."""
    settings = settings_with(*overrides)
    owns = [settings_of_tenant(settings, each) for each in settings.tenants]
    return [round(own.file.write_bytes_per_day / GIB, 3) for own in owns]


def test_tenants_begin_with_guarantees_and_parts_of_the_rest_by_weight_up_to_each_limit() -> None:
    assert objects() == [50, 50]
    assert objects("tenants.acme.weight=3") == [75, 25]
    assert objects("tenants.acme.object.guaranteed=40GiB") == [70, 30]
    assert objects("tenants.acme.object.max=10GiB") == [10, 90]
    assert objects("tenants.acme.object.max=10GiB", "tenants.beta.object.max=20GiB") == [10, 20]
    limited = ("tenants.acme.object.guaranteed=60GiB", "tenants.acme.object.max=60GiB")
    assert objects(*limited) == [60, 40]


def test_the_writes_of_a_day_are_divided_by_weight_up_to_each_limit() -> None:
    assert writes() == [0, 0], "no limit"
    assert writes("tenants.acme.write_per_day=5GiB") == [5, 0]
    assert writes("file.write_per_day=100GiB") == [50, 50]
    assert writes("file.write_per_day=100GiB", "tenants.acme.weight=4") == [80, 20]
    limited = ("file.write_per_day=100GiB", "tenants.acme.write_per_day=10GiB")
    assert writes(*limited) == [10, 90]
    beyond = ("file.write_per_day=100GiB", "tenants.acme.write_per_day=900GiB")
    assert writes(*beyond) == [50, 50]


def test_with_what_others_leave_a_tenant_writes_as_much_as_all_may_or_its_own_limit() -> None:
    def most(*overrides: str) -> list[int]:
        settings = settings_with(*overrides)
        return [write_max(settings, each) // GIB for each in settings.tenants]

    assert most() == [0, 0], "no limit"
    assert most("file.write_per_day=100GiB") == [100, 100]
    limited = "tenants.acme.write_per_day=10GiB"
    assert most("file.write_per_day=100GiB", limited) == [10, 100]
    assert most(limited) == [10, 0]


@given(
    st.integers(1 << 20, 1 << 50),
    st.lists(
        st.tuples(st.floats(0.01, 1000), st.integers(0, 1 << 50), st.integers(0, 1 << 50)),
        min_size=1,
        max_size=12,
    ),
)
def test_parts_together_are_never_more_than_the_whole(
    whole: int, given_: list[tuple[float, int, int]]
) -> None:
    tenants, rest = [], whole
    for number, (weight, wanted, most) in enumerate(given_):
        guaranteed = min(wanted, rest // 2)
        rest -= guaranteed
        tenants.append(
            TenantSettings(
                name=f"t{number}",
                weight=weight,
                object_guaranteed_bytes=guaranteed,
                object_max_bytes=max(most, guaranteed) if most else 0,
                write_bytes_per_day=most,
            )
        )
    base = load_settings(None, [f"object.capacity={whole}", f"file.write_per_day={whole}"])
    settings = replace(base, tenants=tuple(tenants))
    slack = len(tenants)  # a byte each, because 0 is no limit
    parts = [object_share(settings, each) for each in tenants]
    assert sum(parts) <= whole + slack
    for part, each in zip(parts, tenants, strict=True):
        assert part >= each.object_guaranteed_bytes
        assert not each.object_max_bytes or part <= max(1, each.object_max_bytes)
    assert sum(write_share(settings, each) for each in tenants) <= whole + slack


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    per_day = HALF_HOURS * HALF_HOUR_BLOCKS * RECORD
    with Daemon(*TENANTS, f"file.write_per_day={per_day}") as daemon:
        yield daemon.start()


def client_of(daemon: Daemon, tenant: str) -> Client:
    client = Client(f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}")
    client.register(NAMESPACE)
    return client


def written(client: Client) -> int:
    """Put a prompt; return how many of its blocks the file tier got."""
    keys = sample_keys("much", BLOCKS)
    put = client.put(NAMESPACE.id, keys, [bytes(RECORD)] * BLOCKS)
    assert put.committed == BLOCKS
    stats = client.admin.stats
    until(lambda: not stats()["dirty_bytes"])
    return int(stats()["file"]["blocks"])


def test_two_tenants_write_together_what_the_daemon_may(daemon: Daemon) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon, name)) for name in NAMES]
        each = [written(client) for client in clients]
    assert all(blocks >= HALF_HOUR_BLOCKS // 4 for blocks in each), each
    assert sum(each) <= HALF_HOUR_BLOCKS * 1.25, each


def test_a_tenant_that_comes_takes_its_part_from_the_others(daemon: Daemon) -> None:
    with Client(daemon.target, arena=False) as operator:
        operator.admin.add_tenant("late", ["dram.guaranteed=16MiB", "weight=6"])
        with client_of(daemon, "acme") as acme:
            assert written(acme) <= HALF_HOUR_BLOCKS // 8 * 1.5
        operator.admin.delete_tenant("late")
        with client_of(daemon, "beta") as beta:
            assert written(beta) >= HALF_HOUR_BLOCKS // 4


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(*TENANTS, f"object.url=file://{tmp_path}", "object.capacity=16MiB") as daemon:
        yield daemon.start()


def in_bucket(daemon: Daemon) -> dict[str, dict[str, int]]:
    """Return what each has, and may have, of the bucket."""
    with Client(daemon.target, arena=False) as operator:
        tenants = operator.admin.stats()["tenants"]
    return {name: each["share"]["object"] for name, each in tenants.items()}


def caps(daemon: Daemon) -> dict[str, int]:
    """Return what each may have in the bucket, in MiB."""
    found = {name: each["cap_bytes"] >> 20 for name, each in in_bucket(daemon).items()}
    assert sum(found.values()) <= 16
    return found


def test_who_fills_the_bucket_may_have_what_others_leave(bucket: Daemon) -> None:
    assert caps(bucket) == {"acme": 8, "beta": 8}, "until somebody needs more"
    keys = sample_keys("more than half", 12 * 16)
    with client_of(bucket, "acme") as acme:
        put = acme.put(NAMESPACE.id, keys, sample_records(keys, RECORD))
        assert put.committed == len(keys)
        until(lambda: in_bucket(bucket)["acme"]["used_bytes"] >= 12 << 20, 60.0)
    assert caps(bucket)["acme"] >= 12
    assert caps(bucket)["beta"] >= 1
    assert in_bucket(bucket)["acme"]["lent_bytes"] >= 12 << 20, "nothing is guaranteed"


def test_a_tenant_that_comes_begins_with_what_is_free_of_the_bucket(bucket: Daemon) -> None:
    with Client(bucket.target, arena=False) as operator:
        operator.admin.add_tenant("late", ["weight=2", "dram.guaranteed=16MiB"])
        until(lambda: caps(bucket).get("late", 0) >= 1)
        operator.admin.delete_tenant("acme")
        until(lambda: set(caps(bucket)) == {"beta", "late"})
        operator.admin.configure(["tenants.beta.object.max=2MiB"])
        until(lambda: caps(bucket)["beta"] <= 2)
        with pytest.raises(ConfigError, match="together are guaranteed"):
            operator.admin.configure(["tenants.late.object.guaranteed=2GiB"])


def test_a_store_writes_what_another_leaves_of_the_day_and_that_one_its_own(tmp_path: Path) -> None:
    half_hour = 8  # records of each
    per_day = HALF_HOURS * half_hour * NODE_RECORD
    with (
        Node(tmp_path / "busy", write_bytes_per_day=per_day) as busy,
        Node(tmp_path / "idle", write_bytes_per_day=per_day, beside=busy) as idle,
    ):
        spare = SpareWrites(lambda: busy.time)
        for name, node in (("busy", busy), ("idle", idle)):
            budget = node.store.caps.write_budget
            assert budget is not None
            spare.set(name, budget, 2 * per_day, 1.0)

        def written_after(half_hours: int) -> int:
            """Return how many records the busy one has written then, in all."""
            for node in (busy, idle):
                node.time += half_hours * 1800.0
            busy.planner.touch(keys)
            busy.flush()
            return busy.planner.stored.framed

        keys = chain(1, 64)
        busy.put(keys, 0, 64, parts=(FULL,))
        assert not busy.flush()
        assert busy.planner.stored.framed == half_hour, "on credit"
        assert written_after(1) == 2 * half_hour, "the idle one saves its part up"
        assert written_after(1) == 4 * half_hour
        other = chain(2, 64)
        idle.put(other, 0, 64, parts=(FULL,))
        idle.flush()
        assert idle.planner.stored.framed == 2 * half_hour, "saved up, and on credit"
        assert written_after(1) == 5 * half_hour, "nothing is left by the other one"
