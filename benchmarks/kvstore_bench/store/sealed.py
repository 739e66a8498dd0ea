"""`kvstore bench store --arena sealed`: what it costs that nobody may write into the arena.

Two tenants of one daemon take turns, one with a direct arena, one with a sealed one.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.sides import measure
from kvstore_bench.store.store import EXTENT_NBYTES, Say, StorePlan, await_arena

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
            sides = measure({"direct": direct, "sealed": sealed}, plan)
        daemon.stop()
    return {
        "sealed_get_vs_direct": 1 / sides.ratio("get", "sealed", "direct"),
        "sealed_put_vs_direct": 1 / sides.ratio("put", "sealed", "direct"),
        "plan": asdict(plan),
        "seconds": sides.seconds(),
    }
