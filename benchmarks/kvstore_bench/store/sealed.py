"""`kvstore bench store --arena sealed`: what it costs that nobody may write into the arena.

Two tenants of one daemon take turns, one with a direct arena, one with a sealed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import (
    EXTENT_NBYTES,
    Say,
    StorePlan,
    alternate,
    await_arena,
    bench_namespace,
    chain,
    views_of,
)

ARENAS = ("direct", "sealed")


def run_sealed(plan: StorePlan, say: Say) -> dict[str, Any]:
    """Return get and put of a sealed arena, beside those of a direct one: ratios of speeds."""
    each = plan.arena_nbytes
    settings = [f"dram.capacity={2 * each}", f"dram.extent={EXTENT_NBYTES}"]
    for arena in ARENAS:
        settings += [f"tenants.{arena}.dram.guaranteed={each}", f"tenants.{arena}.arena={arena}"]
    with Daemon(*settings, file=False) as daemon:
        daemon.start()
        directory = daemon.socket.parent
        with (
            Client(f"unix:{directory / 'direct/kvstore.sock'}") as direct,
            Client(f"unix:{directory / 'sealed/kvstore.sock'}") as sealed,
        ):
            say(f"{plan.records} x {plan.record_nbytes >> 10} KiB, {plan.rounds} rounds each")
            for client in (direct, sealed):
                await_arena(client, each)
            result = _measure({"direct": direct, "sealed": sealed}, plan)
        daemon.stop()
    return result


def _measure(clients: dict[str, Client], plan: StorePlan) -> dict[str, Any]:
    namespace = bench_namespace("sealed", plan.record_nbytes)
    draw = np.random.default_rng(0)
    source = draw.integers(0, 256, (plan.records, plan.record_nbytes), np.uint8)
    target = np.ones_like(source)
    records, targets = views_of(source), views_of(target)
    keys = chain(namespace.id, plan.records)

    def get_by(client: Client) -> Callable[[], None]:
        def get() -> None:
            if not all(client.get_into(namespace.id, keys, targets)):
                raise Unavailable("a record that was just stored is missing")

        return get

    def put_by(client: Client) -> Callable[[], None]:
        def put() -> None:
            done = client.put(namespace.id, keys, records)
            if done.committed != plan.records:
                raise Unavailable(f"the daemon took {done.committed} of {plan.records} records")

        return put

    def empty() -> None:
        for client in clients.values():
            client.admin.delete(namespace.id, keys)

    for client in clients.values():
        client.register(namespace)
        client.put(namespace.id, keys, records)
    gets = alternate({name: get_by(client) for name, client in clients.items()}, plan.rounds)
    if not np.array_equal(source, target):
        raise Unavailable("the records came back wrong")
    puts = alternate({name: put_by(client) for name, client in clients.items()}, plan.rounds, empty)
    return {
        "sealed_get_vs_direct": gets["direct"].p50 / gets["sealed"].p50,
        "sealed_put_vs_direct": puts["direct"].p50 / puts["sealed"].p50,
        "plan": asdict(plan),
        "seconds": {
            **{f"get_{name}": asdict(timing) for name, timing in gets.items()},
            **{f"put_{name}": asdict(timing) for name, timing in puts.items()},
        },
    }
