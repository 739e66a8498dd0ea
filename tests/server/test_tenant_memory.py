"""A client that keeps its mapping of the arena of a tenant that is deleted."""

from __future__ import annotations

import ctypes
import mmap
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until

MIB = 1 << 20
NAMESPACE = sample_namespace("left", MIB)
KEYS = sample_keys("left", 8)
RECORDS = [bytes([1 + index]) * MIB for index in range(8)]
TENANT = "tenants.first.dram.guaranteed=16MiB"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(TENANT, "server.metrics_open=true", file=False) as daemon:
        yield daemon.start()
        daemon.stop()


def present_nbytes(view: memoryview) -> int:
    """Return how much of a mapping is in memory, whoever has made it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = np.zeros(len(view) // mmap.PAGESIZE, np.uint8)
    address = np.frombuffer(view, np.uint8).ctypes.data
    assert libc.mincore(address, len(view), pages.ctypes.data) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def touched_again(daemon: Daemon) -> float:
    url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("kvstore_touched_again")
    )


def test_the_memory_of_a_deleted_tenant_is_given_back_although_a_client_maps_it(
    daemon: Daemon,
) -> None:
    with Client(daemon.target, arena=False) as operator:
        path = operator.admin.add_tenant("late", ["dram.guaranteed=16MiB"])
        with Client(f"unix:{path}") as client:
            client.put(client.register(NAMESPACE), KEYS, RECORDS, wait_s=5)
            kept = list(client.extents().values())
            assert sum(map(present_nbytes, kept)) >= len(RECORDS) * MIB
            operator.admin.delete_tenant("late")
            assert sum(map(present_nbytes, kept)) == 0
            for view in kept:
                view[: 2 * mmap.PAGESIZE] = bytes([7]) * 2 * mmap.PAGESIZE
            until(lambda: not any(map(present_nbytes, kept)))
        until(lambda: touched_again(daemon) >= 2 * mmap.PAGESIZE)
    assert "arena=touched_again" in daemon.output()
    assert "not_given_back" not in daemon.output()


def test_a_sealed_arena_is_let_go_of_and_says_nothing() -> None:
    sealed = "tenants.second.arena=sealed"
    with Daemon(TENANT, "tenants.second.dram.guaranteed=16MiB", sealed, file=False) as daemon:
        daemon.start()
        path = daemon.socket.parent / "second" / "kvstore.sock"
        with Client(daemon.target, arena=False) as operator, Client(f"unix:{path}") as client:
            client.put(client.register(NAMESPACE), KEYS, RECORDS, wait_s=5)
            kept = client.extents()
            operator.admin.delete_tenant("second")
            assert kept
        daemon.stop()
        assert "not_given_back" not in daemon.output()
