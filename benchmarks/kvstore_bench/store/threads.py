"""How put and get scale with a client's threads, and how long they hold the interpreter's lock.

A host with many cores or drives is as fast as its threads are free of the lock: a second of it held
for a gigabyte is the most that one process moves in a second, whatever it has of cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore_bench.lock_samples import own_watch
from kvstore_bench.store.store import (
    EXTENT_NBYTES,
    Copies,
    Say,
    StorePlan,
    alternate,
    await_arena,
)

WATCH_S = 8.0  # for gets and puts together: a sample every two milliseconds


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
    return {
        "gil_held_s_per_gb": rows[plan.copy_threads]["gil_held_s_per_gb"],
        "threads": {str(count): row for count, row in rows.items() if count in threads},
    }


def _measure(target: str, plan: StorePlan) -> dict[str, Any]:
    nbytes = plan.records * plan.record_nbytes
    with (
        Client(target, copy_threads=plan.copy_threads) as client,
        closing(Copies(client, plan)) as copies,
    ):
        await_arena(client, plan.arena_nbytes)
        timed = {"memcpy": copies.memcpy, "get": copies.get, "put": copies.put}
        timings = alternate(timed, plan.rounds, {"put": copies.delete})
        copies.check()

        with own_watch() as watch:
            end = time.perf_counter() + WATCH_S
            while time.perf_counter() < end:
                with watch.during("get", nbytes):
                    copies.get()
                copies.delete()
                with watch.during("put", nbytes):
                    copies.put()
        copies.delete()
    seconds = {name: each.p50 for name, each in timings.items()}
    return {
        "local_get_ratio": seconds["memcpy"] / seconds["get"],
        "local_put_ratio": seconds["memcpy"] / seconds["put"],
        "gb_per_s": {name: nbytes / each / 1e9 for name, each in seconds.items()},
        "gil_held_s_per_gb": watch.held_s_per_gb(),
    }
