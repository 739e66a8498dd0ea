"""Two real daemons that read each other's arena one-sided, over UCX's TCP: no RDMA device here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.daemon import Daemon
from tests.cluster.fleet import fleet, met, peers_of, wait_for
from tests.peer.onesided import skip_without

SPEC = Namespace(16, (Group("all", 256 << 10),), (("model", "links"),))
KEYS = KeyChain(root_key(SPEC.id), 16).update(list(range(16 * 40)))
RECORDS = [bytes([at]) * (256 << 10) for at in range(40)]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Daemon, Daemon]]:
    skip_without("ucx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        with fleet(2, "cluster.links=ucx") as (one, two):
            yield one, two


def hit(daemon: Daemon) -> int:
    """Acquire the prefix, look at every byte, release; return the hit in blocks."""
    with Client(daemon.target) as client:
        client.register(SPEC)
        grant = client.acquire(SPEC.id, KEYS, wait_s=10.0)
        for slot, wanted, number in zip(grant.slots, RECORDS, grant.checksums, strict=False):
            assert slot is not None
            view = client.view(slot)
            assert view == wanted
            assert checksum(view) == number
        client.release(grant.lease_id)
        return grant.hit_blocks


def borrowed(daemon: Daemon) -> dict[str, int]:
    with Client(daemon.target) as client:
        reads: dict[str, int] = client.admin.stats()["fleet"]["members"][0]["read_bytes"]
        return reads


def test_records_in_memory_are_read_one_sided_and_those_in_files_over_tcp(
    pair: tuple[Daemon, Daemon],
) -> None:
    one, two = pair
    total = sum(map(len, RECORDS))
    with Client(one.target) as client:
        client.register(SPEC)
        client.put(SPEC.id, KEYS, RECORDS, durable=True)
    assert peers_of(two)[0]["link"] == "ucx"
    assert hit(two) == len(KEYS)
    assert borrowed(two) == {"tcp": 0, "onesided": total}
    with Client(one.target) as client:
        assert client.admin.stats()["totals"]["peer_bytes"]["lent"] == total
    one.kill()  # what it had in memory is in its files now
    with Client(two.target) as client:
        client.admin.clear(SPEC.id, this_daemon_only=True)
    assert hit(two) == 0
    one.start()
    wait_for(lambda: met(two))
    assert hit(two) == len(KEYS)
    assert borrowed(two) == {"tcp": total, "onesided": 0}  # of the new link
    assert peers_of(two)[0]["link"] == "ucx"
