"""What the connector counts; any thread may add."""

from __future__ import annotations

import threading

COUNTERS = (
    "lookups",
    "lookups_failed",
    "loaded_blocks",
    "saved_blocks",
    "reuse_wait_seconds",
    "saves_dropped_down",
    "saves_dropped_full",
    "saves_dropped_queue",
    "saves_dropped_reuse",
    "bypassed_inputs",
    "bypassed_unknown_weights",
)


class Counters:
    """Counters of one half of the connector. An unknown name is a KeyError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._totals[name] += count

    def __getitem__(self, name: str) -> float:
        return self._totals[name]

    def as_dict(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)
