"""Two real daemons with tenants: each borrows from the same tenant of the other one alone."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from kvstore import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from tests.cluster.fleet import fleet, wait_for
from tests.tls import Authority

TENANTS = ("acme", "beta", "public")
SETTINGS = (
    *(f"tenants.{name}.dram.guaranteed=16MiB" for name in TENANTS),
    *(f"tenants.{name}.file.guaranteed=64MiB" for name in TENANTS),
    "tenants.public.arena=sealed",
    "tenants.public.shared=true",
    "server.metrics_open=true",
)
SPEC = Namespace(16, (Group("all", 64 << 10),), (("model", "tenants"),))


def prefix(name: int) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of a prefix of 20 blocks, and the records of it."""
    keys = KeyChain(root_key(SPEC.id), 16).update([name] * 16 * 20)
    return keys, [bytes([name, at]) * (32 << 10) for at in range(20)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """Two daemons that encrypt what they store, and show each other certificates."""
    authority = Authority(tmp_path_factory.mktemp("fleet"))
    files = authority.issue("node", "*.default.kvstore")
    with root_key_in_memory() as root:
        secured = (
            f"security.root_key_file={root}",
            f"cluster.cert={files.cert}",
            f"cluster.key={files.key}",
            f"cluster.ca={authority.ca}",
        )
        with fleet(2, *SETTINGS, *secured) as (one, two):
            yield one, two


def client_of(daemon: Daemon, tenant: str) -> Client:
    client = Client(f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}")
    client.register(SPEC)
    return client


def put(daemon: Daemon, tenant: str, name: int) -> None:
    keys, records = prefix(name)
    with client_of(daemon, tenant) as client:
        assert client.put(SPEC.id, keys, records, durable=True).committed == len(keys)


def hit(daemon: Daemon, tenant: str, name: int) -> int:
    """Acquire a prefix, look at every byte, release; return the hit in blocks."""
    keys, records = prefix(name)
    with client_of(daemon, tenant) as client:
        grant = client.acquire(SPEC.id, keys, wait_s=5.0)
        for slot, wanted in zip(grant.slots, records, strict=False):
            assert slot is not None
            assert client.view(slot) == wanted
        assert not grant.lease_id or client.release(grant.lease_id) == [True]
        return grant.hit_blocks


def metrics(daemon: Daemon) -> str:
    with urlopen(f"http://127.0.0.1:{daemon.metrics_port}/metrics") as page:
        return str(page.read(), "utf-8")


def test_a_tenant_borrows_of_itself_and_of_nobody_else(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    put(one, "acme", 1)
    assert hit(two, "beta", 1) == 0
    assert hit(two, "acme", 1) == 20
    with client_of(one, "acme") as acme, client_of(one, "beta") as beta:
        (seen,), (other,) = (each.admin.stats()["fleet"]["members"] for each in (acme, beta))
        assert seen["lent_bytes"] == sum(map(len, prefix(1)[1]))
        assert other["lent_bytes"] == 0  # what others move is none of its business
        assert acme.admin.stats()["totals"]["peer_bytes"]["lent"] == seen["lent_bytes"]
    with Client(one.target, arena=False) as operator:
        stats = operator.admin.stats()
    assert [each["state"] for each in stats["fleet"]["members"]] == ["up"]
    assert stats["fleet"]["secured"] == "sealed"
    assert stats["fleet"]["members"][0]["lent_bytes"] == seen["lent_bytes"]


def test_a_delete_reaches_the_tenant_on_every_host_and_no_other(
    pair: tuple[Daemon, Daemon],
) -> None:
    one, two = pair
    for tenant in ("acme", "beta"):
        put(one, tenant, 2)
        assert hit(two, tenant, 2) == 20
    keys, _ = prefix(2)
    with client_of(two, "acme") as acme:
        assert acme.admin.delete(SPEC.id, keys) == 20
    for daemon in pair:
        with client_of(daemon, "acme") as acme, client_of(daemon, "beta") as beta:
            assert acme.match(SPEC.id, keys).hit_blocks == 0
            assert beta.match(SPEC.id, keys).hit_blocks == 20


def test_what_is_public_on_one_host_every_tenant_reads_on_another(
    pair: tuple[Daemon, Daemon],
) -> None:
    one, two = pair
    put(one, "public", 3)
    assert hit(two, "beta", 3) == 20
    with client_of(two, "beta") as beta:
        assert beta.admin.stats()["blocks"] == 20  # the ones of before: these are not its own
    with client_of(two, "public") as public:
        assert public.match(SPEC.id, prefix(3)[0]).hit_blocks == 20


def test_a_tenant_that_is_not_there_is_refused_and_counted(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    settings = ["dram.guaranteed=8MiB", "file.guaranteed=64MiB"]
    with Client(two.target, arena=False) as operator:
        operator.admin.add_tenant("late", settings)
    assert hit(two, "late", 4) == 0
    assert 'kvstore_peer_refused_total{reason="tenant"} ' in metrics(one)
    with Client(one.target, arena=False) as operator:
        operator.admin.add_tenant("late", settings)
    put(one, "late", 4)
    wait_for(lambda: hit(two, "late", 4) == 20)
    put(one, "acme", 5)
    with Client(one.target, arena=False) as operator:
        assert operator.admin.delete_tenant("acme")[0] > 0
    assert hit(two, "acme", 5) == 0
    put(two, "acme", 5)
    assert hit(two, "acme", 5) == 20
    with client_of(two, "acme") as acme:
        acme.admin.clear(SPEC.id)  # the other host has nothing of it: that is no failure
