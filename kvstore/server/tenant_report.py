"""What all tenants hold and owe, together and each: for the operator's stats and /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstore.store.tenants import Tenants

LABEL = "tenant"
_OF_THE_DAEMON: Final = (
    "process_",
    "kvstore_audit",
    "kvstore_build",
    "kvstore_credential",
    "kvstore_peer",
    "kvstore_rpc",
    "kvstore_task",
)


def summed(each: Sequence[Any]) -> Any:
    """Return the sum of several stats: numbers added, lists joined, texts if all say the same."""
    first = each[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for one in each for key in one)
        return {key: summed([one[key] for one in each if key in one]) for key in keys}
    if isinstance(first, bool):
        return any(each)
    if isinstance(first, int | float):
        return sum(each)
    if isinstance(first, list):
        return [item for one in each for item in one]
    return first if all(one == first for one in each) else "mixed"


class TenantReport:
    """Looks at all tenants, and changes nothing."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def stats(self) -> dict[str, Any]:
        """Return the stats of one store, summed over all; `tenants`: of each; `leaving`: what is
        left of those that are being deleted. One is looked at after the other, and calls are
        answered in between."""
        own: dict[str, dict[str, Any]] = {}
        for each in self._tenants:
            if self._tenants.find(each.name) is not each:  # deleted meanwhile
                continue
            own[each.name] = {
                **each.store.report.stats(),
                "totals": each.metrics.totals(),
                "share": self._share(each.name),
            }
            await asyncio.sleep(0)  # others' turn
        lending = {
            "dram_overshoot_bytes": self._tenants.dram.overshoot_nbytes,
            "file_overshoot_bytes": self._tenants.file.overshoot_nbytes,
        }
        leaving = {name: each.left for name, each in self._tenants.leaving.items()}
        if not own:
            return {"tenants": {}, "lending": lending, "leaving": leaving}
        for stats in own.values():
            stats.pop("fleet", None)  # it says of the whole fleet what the tenant may know
        total = summed(list(own.values()))
        del total["share"]
        told = {**total, "tenants": own, "lending": lending, "leaving": leaving}
        if self._tenants.elsewhere is not None:
            told["fleet"] = self._tenants.elsewhere.stats()
        told["uptime_s"] = max(each["uptime_s"] for each in own.values())
        return told

    def _share(self, name: str) -> dict[str, dict[str, int]]:
        """Return what a tenant has of each tier whose room is lent, in bytes. lent: to it, beyond
        what it is guaranteed."""
        lent = self._tenants.lending
        tiers = {"dram": lent.dram, "file": lent.file, "object": lent.object}
        parts = {tier: lending.part(name) for tier, lending in tiers.items()}
        return {
            tier: {
                "used_bytes": part.used,
                "guaranteed_bytes": part.guaranteed,
                "cap_bytes": part.cap,
                "max_bytes": part.most,
                "lent_bytes": max(0, part.used - part.guaranteed),
            }
            for tier, part in parts.items()
            if part is not None
        }


class TenantCollector(Collector):
    """Every metric of every tenant, with the label `tenant`, and those of the daemon without."""

    def __init__(self, daemon: CollectorRegistry, tenants: Tenants) -> None:
        self._daemon = daemon
        self._tenants = tenants

    def registry(self) -> CollectorRegistry:
        """Return a registry of this alone."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def describe(self) -> list[Metric]:
        return list(self._daemon.collect())  # of every tenant there are the same

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for family in self._daemon.collect():
            if family.name.startswith(_OF_THE_DAEMON):
                families[family.name] = family
        for tenant in self._tenants:
            for family in tenant.metrics.registry.collect():
                if family.name.startswith(("process_", "kvstore_build")):
                    continue
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, LABEL: tenant.name}
                    known.samples.append(sample._replace(labels=labels))
        yield from families.values()
