"""The counters in vLLM's terms: for its log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstore_vllm.counters import COUNTERS, GAUGES


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Changes of `COUNTERS` and `GAUGES`, by name; they add up over steps and workers."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 4) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as `vllm:kvstore_<name>`, labelled by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], Any] = {}
        self._values: dict[tuple[int, str], float] = {}
        for name, text in COUNTERS.items():
            counter = metric_types[Counter](f"vllm:kvstore_{name}", text, labelnames=labelnames)
            for engine, labels in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*labels)
        for name, text in GAUGES.items():
            gauge = metric_types[Gauge](
                f"vllm:kvstore_{name}",
                text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for engine, labels in per_engine_labelvalues.items():
                self._gauges[engine, name] = gauge.labels(*labels)
                self._gauges[engine, name].set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            metric = (engine_idx, name)
            if name in GAUGES:  # set, not added to: not every kind of gauge that vLLM uses can
                self._values[metric] = self._values.get(metric, 0) + count
                self._gauges[metric].set(self._values[metric])
            else:
                self._counters[metric].inc(count)
