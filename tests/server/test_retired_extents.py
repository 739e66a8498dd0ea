"""A client process that keeps its mapping of memory that its tenant has given back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until

MIB = 1 << 20
NAMESPACE = sample_namespace("retired", MIB)
RECORDS = [bytes([index]) * MIB for index in range(200)]
KEEPER = """
import os, sys
from kvstore import Client

with Client(sys.argv[1]) as client:
    client.connect()
    kept = client.extents()
    print(len(kept), flush=True)
    for line in sys.stdin:
        gone = [view for id, view in kept.items() if id not in client.extents()]
        for view in gone:
            for at in range(0, len(view), 4096):
                view[at] = 1
        print(sum(map(len, gone)), flush=True)
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    tenants = [f"tenants.{name}.dram.guaranteed=64MiB" for name in ("noisy", "quiet")]
    with Daemon("dram.capacity=256MiB", *tenants, file=False) as daemon:
        yield daemon.start()
        daemon.stop()


def target(daemon: Daemon, tenant: str) -> str:
    return f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}"


def put(daemon: Daemon, tenant: str, blocks: int) -> None:
    with Client(target(daemon, tenant)) as client:
        client.register(NAMESPACE)
        for at in range(0, blocks, 8):
            keys = sample_keys(f"{tenant} {at}", 8)
            client.put(NAMESPACE.id, keys, RECORDS[at : at + 8], wait_s=5)


def totals(daemon: Daemon, tenant: str) -> float:
    with Client(target(daemon, tenant), arena=False) as client:
        return float(client.admin.stats()["totals"]["touched_again_bytes"])


def test_what_a_client_touches_again_is_given_back_and_counted_against_its_tenant(
    daemon: Daemon,
) -> None:
    put(daemon, "noisy", 192)  # it borrows
    command = [sys.executable, "-c", KEEPER, target(daemon, "noisy")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            assert int(keeper.stdout.readline()) > 1
            put(daemon, "quiet", 56)  # within its guarantee: what was lent comes back

            def touched() -> int:
                print("touch", file=keeper.stdin, flush=True)
                assert keeper.stdout is not None
                return int(keeper.stdout.readline())

            until(lambda: touched() > 0, 20)
            until(lambda: totals(daemon, "noisy") >= MIB, 20)
            assert "arena=touched_again" in daemon.output()
            assert totals(daemon, "quiet") == 0
        finally:
            keeper.kill()
