"""Durable commits of 4 MiB: by many tenants at once, and by one of them alone, in turns.

Each tenant commits one record, waits until it is durable, and commits the next. Both sides run
against one daemon and commit the same number of records.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore import AsyncClient
from kvstore.model.block import NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import bench_namespace, chain

RECORD_NBYTES = 4 << 20
COMMITS_EACH = 2  # of a tenant in a round of all
ROUNDS = 7
DRAM_NBYTES = 32 << 20  # of each tenant
FILE_NBYTES = 1 << 30
WAIT_S = 30.0


@dataclass(slots=True)
class _Tenant:
    """One tenant. records: of other bytes each, so that none is stored already."""

    client: AsyncClient
    namespace_id: NamespaceId
    record: bytes

    async def commit(self, count: int) -> None:
        for _ in range(count):
            keys = chain(self.namespace_id, 1, salt=os.urandom(8))
            done = await self.client.put(
                self.namespace_id, keys, [self.record], durable=True, wait_s=WAIT_S
            )
            if not done.durable:
                raise Unavailable("a record was not durable in time")


def measure_durable(tenants: int, scratch: Path) -> dict[str, Any]:
    """Return the speed of all tenants over that of one, and both in bytes/s. Raises Unavailable."""
    names = [f"durable-{number}" for number in range(tenants)]
    settings = [
        f"dram.capacity={tenants * DRAM_NBYTES}",
        f"file.path={scratch}",
        f"file.capacity={tenants * FILE_NBYTES}",
    ]
    for name in names:
        settings += [
            f"tenants.{name}.dram.guaranteed={DRAM_NBYTES}",
            f"tenants.{name}.file.guaranteed={FILE_NBYTES}",
        ]
    with Daemon(*settings) as daemon:
        daemon.start()
        targets = [f"unix:{daemon.socket.parent / name / 'kvstore.sock'}" for name in names]
        speeds = asyncio.run(_alternated(targets))
        daemon.stop()
    medians = {side: statistics.median(each) for side, each in speeds.items()}
    return {
        f"durable_{tenants}_vs_1": medians["all"] / medians["one"],
        "durable_bytes_per_s": {
            side: {"p50": medians[side], "min": min(each), "max": max(each)}
            for side, each in speeds.items()
        },
    }


async def _alternated(targets: Sequence[str]) -> dict[str, list[float]]:
    """Measure bytes/s of one and of all in turns, after a round of each that does not count."""
    async with AsyncExitStack() as stack:
        tenants = []
        for target in targets:
            client = AsyncClient(target)
            stack.push_async_callback(client.close)
            namespace = bench_namespace("durable", RECORD_NBYTES)
            await client.register(namespace)
            tenants.append(_Tenant(client, namespace.id, os.urandom(RECORD_NBYTES)))
        count = COMMITS_EACH * len(tenants)
        speeds: dict[str, list[float]] = {"one": [], "all": []}
        for number in range(-1, ROUNDS):
            for side, some in (("one", tenants[:1]), ("all", tenants)):
                began = time.perf_counter()
                await asyncio.gather(*(each.commit(count // len(some)) for each in some))
                if number >= 0:
                    took_s = time.perf_counter() - began
                    speeds[side].append(count * RECORD_NBYTES / took_s)
        return speeds
