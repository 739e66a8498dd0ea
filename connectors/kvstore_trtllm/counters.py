"""What the connector counts; any thread may add."""

from __future__ import annotations

import threading

COUNTERS = (
    "lookups",
    "lookups_failed",
    "loaded_blocks",
    "saved_blocks",
    "saves_dropped_away",
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
        self._totals = dict.fromkeys(COUNTERS, 0)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._totals[name] += count

    def __getitem__(self, name: str) -> int:
        return self._totals[name]

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
