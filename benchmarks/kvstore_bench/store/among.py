"""`kvstore bench store --tenants N`: what a tenant pays for not being alone.

A tenant among N of one daemon, and the only user of a daemon without tenants, take turns. The other
tenants are idle: what busy ones cost is `kvstore bench tenants`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.sides import measure
from kvstore_bench.store.store import EXTENT_NBYTES, Say, StorePlan, await_arena

IDLE_NBYTES = 16 << 20
FILE_NBYTES = 1 << 20


def run_among(plan: StorePlan, tenants: int, say: Say) -> dict[str, Any]:
    """Return match, get and put of a tenant beside those without tenants: ratios of times."""
    each = plan.arena_nbytes
    extent = f"dram.extent={EXTENT_NBYTES}"
    settings = [
        f"tenants.t{number}.{tier}.guaranteed={nbytes}"
        for number in range(tenants)
        for tier, nbytes in (("dram", IDLE_NBYTES if number else each), ("file", FILE_NBYTES))
    ]
    capacity = each + (tenants - 1) * IDLE_NBYTES
    with (
        Daemon(f"dram.capacity={each}", extent, file=False) as alone,
        Daemon(f"dram.capacity={capacity}", extent, *settings, file=False) as shared,
    ):
        alone.start()
        shared.start()
        with (
            Client(alone.target) as only,
            Client(f"unix:{shared.socket.parent / 't0/kvstore.sock'}") as one,
        ):
            say(f"{tenants} tenants; {plan.records} x {plan.record_nbytes >> 10} KiB")
            for client in (only, one):
                await_arena(client, each)
            sides = measure({"alone": only, "among": one}, plan)
        alone.stop()
        shared.stop()
    return {
        "tenants": tenants,
        **{f"{what}_vs_alone": sides.ratio(what, "among", "alone") for what in sides._fields},
        "plan": asdict(plan),
        "seconds": sides.seconds(),
    }
