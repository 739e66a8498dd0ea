"""What is told of all tenants: one is looked at after the other, and others have turns between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.daemon import wire_store
from kvstore.metrics import Metrics
from kvstore.server.tenant_report import TenantReport
from kvstore.settings import load_settings
from kvstore.store.tenants import Tenants

SETTINGS = [f"tenants.{name}.dram.guaranteed=16MiB" for name in ("a", "b", "c")]


def stats_while(happens: Callable[[Tenants], Awaitable[None]]) -> tuple[dict[str, Any], int]:
    """Return the stats of three tenants, and how often others had their turn meanwhile; `happens`
    is called with the tenants at the first of these."""

    async def main() -> tuple[dict[str, Any], int]:
        tenants = Tenants(load_settings(None, ["file.path=", *SETTINGS]), wire_store, Metrics())
        await tenants.start()
        report = asyncio.ensure_future(TenantReport(tenants).stats())
        turns = 0
        while not report.done():
            if turns == 1:
                await happens(tenants)
            turns += 1
            await asyncio.sleep(0)
        found = report.result()
        await tenants.close(0.0)
        return found, turns

    return asyncio.run(main())


async def nothing(tenants: Tenants) -> None: ...


def test_others_have_their_turn_between_two_tenants() -> None:
    stats, turns = stats_while(nothing)
    assert turns > 3
    assert set(stats["tenants"]) == {"a", "b", "c"}
    assert "share" not in stats
    for each in stats["tenants"].values():
        assert each["share"]["dram"]["guaranteed_bytes"] == 16 << 20
    total = sum(each["dram"]["capacity_bytes"] for each in stats["tenants"].values())
    assert stats["dram"]["capacity_bytes"] == total


def test_a_tenant_that_is_deleted_meanwhile_is_left_out() -> None:
    async def deletes(tenants: Tenants) -> None:
        tenant = tenants.get("c")
        tenants.remove("c")
        await tenant.store.close(0.0)

    stats, _ = stats_while(deletes)
    assert set(stats["tenants"]) == {"a", "b"}
