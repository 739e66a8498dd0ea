"""Every metric kvstore exports: one place for names, units and labels.

One `Metrics` per node, on a registry of its own, so that several nodes fit into one process. Blocks
are counted once per call, never one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A call on the unix socket takes 0.3 ms; past 30 s every wait has ended.
RPC_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """The metrics of one node. `tier` is dram or file; `direction` is read or write."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._lookups()
        self._bytes()
        self._losses()
        self._clients()
        self._evicted = {"dram": 0, "file": 0}

    def publish(self, stats: Mapping[str, Any]) -> None:
        """Set the gauges from `Store.stats()`; other counters are kept where things happen."""
        for state in ("used", "capacity", "leased", "limbo"):
            self.dram_bytes.labels(state).set(stats["dram"][f"{state}_bytes"])
        for state in ("physical", "capacity"):
            self.file_bytes.labels(state).set(stats["file"][f"{state}_bytes"])
        for tier, before in self._evicted.items():
            self.blocks.labels(tier).set(stats[tier]["blocks"])
            self._evicted[tier] = stats[tier]["evicted_blocks"]
            self.evictions.labels(tier).inc(self._evicted[tier] - before)
        self.dirty_bytes.set(stats["dirty_bytes"])
        self.durable_lag_seconds.set(stats["durable_lag_s"])
        self.sessions.set(stats["sessions"])
        self.leases.set(stats["leases"])

    def _lookups(self) -> None:
        self.lookups = self._counter("lookup_blocks", "Blocks asked for by acquire and get")
        self.hits = self._counter("hit_blocks", "Blocks served, by where they lay", "tier")
        self.blocks = self._gauge("blocks", "Blocks held, by tier", "tier")
        self.promotions = self._counter("promoted_blocks", "Blocks brought from file to DRAM")
        self.evictions = self._counter("evicted_blocks", "Blocks that left a tier", "tier")

    def _bytes(self) -> None:
        self.bytes = self._counter("tier_bytes", "Bytes moved", "tier", "direction")
        self.dram_bytes = self._gauge(
            "dram_bytes", "Bytes of the arena: used, capacity, leased, limbo", "state"
        )
        self.file_bytes = self._gauge(
            "file_bytes", "Bytes of the file tier: physical, capacity", "state"
        )
        self.dirty_bytes = self._gauge("dirty_bytes", "Committed bytes no fdatasync covers yet")
        self.durable_lag_seconds = self._gauge(
            "durable_lag_seconds", "Age of the oldest committed block no fdatasync covers yet"
        )

    def _losses(self) -> None:
        self.refusals = self._counter("refused_parts", "Records not stored, by reason", "reason")
        self.corrupt_blocks = self._counter(
            "corrupt_blocks", "Blocks dropped because bytes did not match a checksum", "where"
        )
        self.write_behind_errors = self._counter(
            "write_behind_errors", "Writes to the file tier that failed"
        )

    def _clients(self) -> None:
        self.sessions = self._gauge("sessions", "Sessions open")
        self.leases = self._gauge("leases", "Leases and reservations held")
        self.rpc_seconds = Histogram(
            "kvstore_rpc_seconds",
            "Time to answer, by method",
            ["method"],
            registry=self.registry,
            buckets=RPC_BUCKETS_S,
        )
        self.rpc_errors = self._counter("rpc_errors", "Calls refused, by error", "method", "error")

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"kvstore_{name}", doc, labels, registry=self.registry)

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(f"kvstore_{name}", doc, labels, registry=self.registry)
