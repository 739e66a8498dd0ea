"""`kvstore bench cluster`: one daemon reads what another one has.

A get is an acquire at the borrower of a prefix that only the lender has, until the grant: found,
sent, verified and committed. In between the borrower is cleared. Rounds alternate with iperf3, or
with plain reads, in one run; a ratio is that of the medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import AsyncClient, Client
from kvstore.model.block import BlockKey
from kvstore.model.errors import Unavailable
from kvstore_bench.cluster.gets import borrowing
from kvstore_bench.cluster.iperf3 import INSTALL, Iperf3, has_iperf3, loopback
from kvstore_bench.cluster.local import measure_local
from kvstore_bench.cluster.pair import Pair, Prefix, pair
from kvstore_bench.cluster.plain import PlainReads
from kvstore_bench.cluster.plan import WAIT_S, ClusterPlan
from kvstore_bench.cluster.view import measure_staleness, measure_view
from kvstore_bench.store.store import Timing, bench_namespace
from kvstore_bench.tiers.tier import Say, summed_up

STEPS = 9  # of progress

Sides = Mapping[str, Callable[[], float]]


def run(plan: ClusterPlan, path: Path, say: Say) -> dict[str, Any]:
    """Measure everything. Raises Unavailable if records come back wrong, or not at all."""
    with ExitStack() as stack:
        iperf3: Iperf3 | None = None
        if has_iperf3():
            iperf3 = stack.enter_context(loopback(plan.streams))
        else:
            say(f"{INSTALL}; measuring without it: no ratios to it")
        speeds: dict[str, dict[str, Any]] = {}
        with pair(plan, path) as clear:
            result = _in_clear(clear, speeds, iperf3, say)
        say("gets, sealed")
        with pair(plan, path, sealed=True) as sealed:
            prefix = sealed.put("sealed", plan.record_nbytes)
            speeds |= _gets(sealed, prefix, "peer_get_sealed", iperf3)
    result |= measure_view(plan, say) | measure_staleness(plan, say)
    for name in ("peer_get", "peer_get_sealed", "peer_get_256k"):
        result[f"{name}_vs_iperf3"] = _ratio(speeds, name, f"iperf3_{name}")
    result["peer_files_vs_plain_reads"] = _ratio(speeds, "peer_files", "plain_reads")
    return {**result, "bytes_per_s": speeds, "plan": asdict(plan)}


def _in_clear(
    daemons: Pair, speeds: dict[str, dict[str, Any]], iperf3: Iperf3 | None, say: Say
) -> dict[str, Any]:
    plan = daemons.plan
    say(f"gets of {plan.nbytes >> 20} MiB in records of {plan.record_nbytes >> 10} KiB")
    prefix = daemons.put("records", plan.record_nbytes, durable=True)
    speeds |= _gets(daemons, prefix, "peer_get", iperf3)
    say(f"the first {plan.first_blocks} of {plan.blocks} blocks")
    first = _first_windows(daemons, prefix)
    say(f"gets in records of {plan.small_nbytes >> 10} KiB")
    small = daemons.put("small", plan.small_nbytes)
    speeds |= _gets(daemons, small, "peer_get_256k", iperf3)
    say("local gets while lending")
    local = measure_local(daemons, prefix, round(speeds["peer_get"]["p50"] / 10), iperf3)
    say("gets of what the lender has in its files alone")
    daemons.restart_lender()
    with borrowing(daemons, prefix) as get, PlainReads(daemons.lender_files, plan) as plain:
        speeds |= _alternated({"peer_files": get, "plain_reads": plain.run}, plan.rounds)
    return {
        "first_window_ms": 1e3 * first.p50,
        **local,
        "seconds": {"first_window": asdict(first)},
    }


def _ratio(speeds: Mapping[str, Mapping[str, Any]], ours: str, best: str) -> float | None:
    return speeds[ours]["p50"] / speeds[best]["p50"] if best in speeds else None


def _gets(
    daemons: Pair, prefix: Prefix, name: str, iperf3: Iperf3 | None
) -> dict[str, dict[str, float]]:
    with borrowing(daemons, prefix) as get:
        sides = {name: get} | ({f"iperf3_{name}": iperf3.measure} if iperf3 is not None else {})
        return _alternated(sides, daemons.plan.rounds)


def _alternated(sides: Sides, rounds: int) -> dict[str, dict[str, float]]:
    """Measure bytes/s of the sides in turns, after one round that does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, rounds):
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            bytes_per_s = side()
            if number >= 0:
                speeds[name].append(bytes_per_s)
    return summed_up(speeds)


def _first_windows(daemons: Pair, prefix: Prefix) -> Timing:
    """Time until the first blocks of a prefix are leased, while all of it is on its way."""
    took = []
    first_blocks = daemons.plan.first_blocks

    async def acquired(remote: AsyncClient, keys: list[BlockKey]) -> tuple[int, int, float]:
        grant = await remote.acquire(prefix.namespace_id, keys, wait_s=WAIT_S)
        return grant.hit_blocks, grant.lease_id, time.perf_counter()

    with Client(daemons.borrower.target) as client:
        client.register(bench_namespace(prefix.name, prefix.record_nbytes))
        for _ in range(2 * daemons.plan.rounds):
            began = time.perf_counter()
            rest = client.submit(partial(acquired, keys=prefix.keys))
            first = client.submit(partial(acquired, keys=prefix.keys[:first_blocks]))
            (hit, lease_id, at), (_, whole_id, _) = first.result(), rest.result()
            if hit != first_blocks:
                raise Unavailable(f"{hit} of the first {first_blocks} blocks came from the lender")
            took.append(at - began)
            client.release(lease_id, whole_id)
            client.admin.clear(prefix.namespace_id, this_daemon_only=True)
    return Timing.of(took)
