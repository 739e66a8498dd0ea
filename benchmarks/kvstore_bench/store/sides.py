"""The same puts and gets of several clients in turns: what one daemon costs beside another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore_bench.store.store import (
    MATCH_KEYS,
    SMALL_RECORD_NBYTES,
    StorePlan,
    Timing,
    alternate,
    bench_namespace,
    chain,
    views_of,
)

Timings = dict[str, Timing]


class Sides(NamedTuple):
    """Seconds of each side by its name."""

    match: Timings
    get: Timings
    put: Timings

    def ratio(self, what: str, side: str, beside: str) -> float:
        """Return how many times as long one side takes, in the median."""
        timings: Timings = getattr(self, what)
        return timings[side].p50 / timings[beside].p50

    def seconds(self) -> dict[str, Any]:
        """Return all timings, for the result."""
        return {
            f"{what}_{side}": asdict(timing)
            for what in self._fields
            for side, timing in getattr(self, what).items()
        }


def measure(clients: Mapping[str, Client], plan: StorePlan) -> Sides:
    """Time matches of 1000 keys, gets and puts of every client, in turns. Raises Unavailable."""
    return Sides(_matches(clients, plan), *_moves(clients, plan))


def _matches(clients: Mapping[str, Client], plan: StorePlan) -> Timings:
    namespace = bench_namespace("matches", SMALL_RECORD_NBYTES)
    keys = chain(namespace.id, MATCH_KEYS)
    records = [bytes(SMALL_RECORD_NBYTES)] * MATCH_KEYS

    def match_by(client: Client) -> Callable[[], None]:
        def match() -> None:
            if client.match(namespace.id, keys).hit_blocks != MATCH_KEYS:
                raise Unavailable("a block that was just stored is missing")

        return match

    for client in clients.values():
        client.register(namespace)
        client.put(namespace.id, keys, records)
    sides = {name: match_by(client) for name, client in clients.items()}
    return alternate(sides, plan.match_rounds)


def _moves(clients: Mapping[str, Client], plan: StorePlan) -> tuple[Timings, Timings]:
    namespace = bench_namespace("moves", plan.record_nbytes)
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
    sides = {name: get_by(client) for name, client in clients.items()}
    gets = alternate(sides, plan.rounds)
    for name, get in sides.items():
        np.invert(source, out=target)  # no byte is right already
        get()
        if not np.array_equal(source, target):
            raise Unavailable(f"the records came back wrong: {name}")
    sides = {name: put_by(client) for name, client in clients.items()}
    return gets, alternate(sides, plan.rounds, dict.fromkeys(sides, empty))
