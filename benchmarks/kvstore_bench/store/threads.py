"""How put and get scale with a client's threads, and how long they hold the interpreter's lock.

A host with many cores or drives is as fast as its threads are free of the lock: a second of it held
for a gigabyte is the most that one process moves in a second, whatever it has of cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.lock import lock_held_shares
from kvstore_bench.store.store import (
    EXTENT_NBYTES,
    Copies,
    Say,
    StorePlan,
    alternate,
    await_arena,
)

COUNT_S = 4.0  # of counting beside each side


def run(plan: StorePlan, threads: Sequence[int], say: Say) -> dict[str, Any]:
    """Measure a daemon of our own with so many threads in the client, one number after the other.

    gil_held_s_per_gb: of the number of threads that a client has by itself."""
    settings = (f"dram.capacity={plan.arena_nbytes}", f"dram.extent={EXTENT_NBYTES}")
    rows = {}
    with Daemon(*settings, file=False) as daemon:
        daemon.start()
        for count in sorted({*threads, plan.copy_threads}):
            say(f"{count} threads, {plan.rounds} rounds")
            rows[count] = _measure(daemon.target, replace(plan, copy_threads=count))
    own = rows[plan.copy_threads].pop("gil_held_s_per_gb")
    for row in rows.values():
        row.pop("gil_held_s_per_gb", None)
    return {
        "gil_held_s_per_gb": own,
        "threads": {str(count): row for count, row in rows.items() if count in threads},
    }


def _measure(target: str, plan: StorePlan) -> dict[str, Any]:
    gigabytes = plan.records * plan.record_nbytes / 1e9
    with (
        Client(target, copy_threads=plan.copy_threads) as client,
        closing(Copies(client, plan)) as copies,
    ):
        await_arena(client, plan.arena_nbytes)
        timed = {"memcpy": copies.memcpy, "get": copies.get, "put": copies.put}
        timings = alternate(timed, plan.rounds, {"put": copies.delete})
        copies.check()

        def put() -> None:
            copies.delete()
            copies.put()

        counted = {"plain": copies.memcpy, "get": copies.get, "put": put}
        shares = lock_held_shares(counted, plan.rounds, COUNT_S)
        copies.delete()
    seconds = {name: each.p50 for name, each in timings.items()}
    return {
        "local_get_ratio": seconds["memcpy"] / seconds["get"],
        "local_put_ratio": seconds["memcpy"] / seconds["put"],
        "gb_per_s": {name: gigabytes / each for name, each in seconds.items()},
        "lock_held_share": shares,
        "gil_held_s_per_gb": {
            name: share * seconds[name] / gigabytes for name, share in shares.items()
        },
    }
