"""Gets from another daemon, each of a prefix that the borrower has not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvstore import Client
from kvstore.model.block import Grant
from kvstore.model.errors import Unavailable
from kvstore_bench.cluster.pair import Pair, Prefix
from kvstore_bench.cluster.plan import WAIT_S
from kvstore_bench.store.store import bench_namespace, views_of

FIRST_TRIES = 5


@contextmanager
def borrowing(daemons: Pair, prefix: Prefix) -> Iterator[Callable[[], float]]:
    """Yield a get, in bytes/s, after one whose bytes were compared with what was put."""
    with Client(daemons.borrower.target) as client:
        client.register(bench_namespace(prefix.name, prefix.record_nbytes))
        _compare(client, prefix)
        yield partial(get, client, prefix)


def _compare(client: Client, prefix: Prefix) -> None:
    grant = _whole(client, prefix)
    for slot, row in zip(grant.slots, views_of(prefix.rows), strict=True):
        if slot is None or client.view(slot) != row:
            raise Unavailable("what was borrowed is not what was put")
    client.release(grant.lease_id)
    client.admin.clear(prefix.namespace_id, this_daemon_only=True)


def _whole(client: Client, prefix: Prefix) -> Grant:
    """Lease all of a prefix. The first answer of a lender that is busy may come too late for a
    hit. Raises Unavailable."""
    for _ in range(FIRST_TRIES):
        grant = client.acquire(prefix.namespace_id, prefix.keys, wait_s=WAIT_S)
        if grant.hit_blocks == len(prefix.keys):
            return grant
        client.release(grant.lease_id)
    raise Unavailable(f"{grant.hit_blocks} of {len(prefix.keys)} blocks came from the lender")


def get(client: Client, prefix: Prefix) -> float:
    """Borrow all of a prefix, and forget it again; return bytes/s. Raises Unavailable."""
    began = time.perf_counter()
    grant = client.acquire(prefix.namespace_id, prefix.keys, wait_s=WAIT_S)
    took_s = time.perf_counter() - began
    client.release(grant.lease_id)
    client.admin.clear(prefix.namespace_id, this_daemon_only=True)
    if grant.hit_blocks != len(prefix.keys):
        raise Unavailable(f"{grant.hit_blocks} of {len(prefix.keys)} blocks came from the lender")
    return prefix.nbytes / took_s
