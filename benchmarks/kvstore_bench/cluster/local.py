"""Gets of the lender's own engines while another daemon borrows, beside the same without.

At a tenth of the speed they are also measured beside iperf3, which sends as many bytes: what these
cost on processors that both hosts share, whoever sends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Event, Thread

import numpy as np

from kvstore import Client
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore_bench.cluster.gets import borrowing
from kvstore_bench.cluster.iperf3 import Iperf3
from kvstore_bench.cluster.pair import Pair, Prefix
from kvstore_bench.store.store import bench_namespace, views_of
from kvstore_bench.tiers.tier import summed_up

GET_BLOCKS = 8  # in one local get

Beside = Mapping[str, Callable[[], AbstractContextManager[None]]]
"""What runs while gets are timed."""


def measure_local(
    daemons: Pair, prefix: Prefix, tenth: int, iperf3: Iperf3 | None
) -> dict[str, object]:
    """Measure at full speed, then at `tenth` bytes a second."""
    full = _measured(daemons, {"lending": partial(_lending, daemons, prefix)})
    daemons.restart_lender(f"cluster.serve_bytes_per_s={tenth}")
    # it lends from its files now, as any daemon that has started again
    control = {"iperf3": partial(iperf3.running, tenth)} if iperf3 is not None else {}
    limited = _measured(daemons, {"lending": partial(_lending, daemons, prefix), **control})
    return {
        "local_get_ratio": _ratio(full, "lending"),
        "local_get_ratio_at_a_tenth": _ratio(limited, "lending"),
        "local_get_ratio_beside_iperf3": _ratio(limited, "iperf3"),
        "local_bytes_per_s": {"full": full, "at_a_tenth": limited},
    }


def _ratio(speeds: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    return speeds[name]["p50"] / speeds["alone"]["p50"] if name in speeds else None


def _measured(daemons: Pair, beside: Beside) -> dict[str, dict[str, float]]:
    plan = daemons.plan
    own = daemons.put("own", plan.record_nbytes)
    count = min(plan.blocks, GET_BLOCKS)
    keys = own.keys[:count]
    targets = views_of(np.ones((count, plan.record_nbytes), np.uint8))
    speeds: dict[str, list[float]] = {"alone": [], **{name: [] for name in beside}}
    with Client(daemons.lender.target) as client:
        client.register(bench_namespace(own.name, own.record_nbytes))

        def timed() -> float:
            end = time.perf_counter() + plan.seconds
            began, nbytes = time.perf_counter(), 0
            while time.perf_counter() < end:
                if not all(client.get_into(own.namespace_id, keys, targets)):
                    raise Unavailable("a record that was just stored is missing")
                nbytes += count * plan.record_nbytes
            return nbytes / (time.perf_counter() - began)

        timed()
        for _ in range(max(3, plan.rounds // 3)):
            speeds["alone"].append(timed())
            for name, runs in beside.items():
                with runs():
                    speeds[name].append(timed())
    return summed_up(speeds)


@contextmanager
def _lending(daemons: Pair, prefix: Prefix) -> Iterator[None]:
    """Borrow again and again until the end. Raises what made it impossible."""
    begun, over = Event(), Event()
    errors: list[KVStoreError] = []

    def borrow() -> None:
        try:
            with borrowing(daemons, prefix) as get:
                begun.set()
                while not over.is_set():
                    get()
        except KVStoreError as error:
            errors.append(error)
        finally:
            begun.set()

    thread = Thread(target=borrow)
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
