"""What the connector counts; any thread may add. Every name and help text is here."""

from __future__ import annotations

import threading

COUNTERS = {
    "lookups": "Requests for which the cache was asked.",
    "lookups_late": "Lookups abandoned at their deadline.",
    "lookups_failed": "Lookups the daemon could not answer.",
    "offered_tokens": "Tokens offered to the scheduler as loadable.",
    "loaded_blocks": "Records copied to the device, verified, and confirmed as still leased.",
    "loaded_bytes": "Bytes of those records, and of their fine parts.",
    "loaded_lossy_blocks": "Records among them that are lossy.",
    "loaded_base_blocks": "Lossy records among them without a fine part that could be used.",
    "load_seconds": "Time spent copying and verifying them.",
    "computed_tokens": "Tokens computed by large steps, on each worker.",
    "computed_seconds": "Time of these steps; loads compete with it.",
    "loads": "Requests loaded.",
    "loads_early": "Requests among them whose first blocks were copied while the last were still "
    "read from a file.",
    "loads_failed": "Requests that were recomputed because their load failed.",
    "loads_given_up": "Requests that were recomputed because reading the rest would have taken "
    "longer than computing it, or did not end in the time for it.",
    "corrupt_blocks": "Records that did not match their checksum; dropped from the cache.",
    "corrupt_fine_blocks": "Fine parts that did not match their record; reported to the daemon, "
    "and not used.",
    "saved_blocks": "Records copied from the device and committed, fine parts among them.",
    "saved_bytes": "Bytes of those records.",
    "saved_fine_bytes": "Bytes of the fine parts among them.",
    "saved_raw_bytes": "Bytes of the KV in them, as the engine holds it.",
    "saved_uncoded_blocks": "Records among them that are raw, because coding made them no smaller.",
    "save_seconds": "Time spent copying and hashing them, in the background.",
    "known_blocks": "Records that were not encoded again, because the daemon has them.",
    "bounced_bytes": "Bytes copied through a pinned buffer, because the GPU could not access the "
    "daemon's memory (yet): if this keeps growing, look for register=failed in the log.",
    "refused_blocks": "Records the daemon had no room for.",
    "saves_dropped_queue": "Saves dropped because the queue was full.",
    "saves_dropped_down": "Saves dropped because the daemon was away or failed.",
    "saves_dropped_reuse": "Saves dropped because their device blocks were needed again.",
    "saves_dropped_unknown_weights": "Saves dropped because a worker had not hashed the weights "
    "yet.",
    "saves_dropped_changed_adapter": "Saves dropped because the files of the LoRA adapter changed.",
    "reuse_wait_seconds": "Time steps waited for copies out of blocks they overwrite.",
    "bypassed_unknown_weights": "Requests computed without the cache, because the files of the "
    "weights were not hashed yet.",
    "bypassed_unknown_adapter": "Requests computed without the cache, because the files of their "
    "LoRA adapter were not hashed yet.",
    "bypassed_changed_adapter": "Requests computed without the cache, because the engine may hold "
    "their LoRA adapter as it was before its files changed: restart the engine.",
    "bypassed_unreadable_adapter": "Requests computed without the cache, because the files of "
    "their LoRA adapter cannot be read: is it in a folder of this machine?",
    "bypassed_multimodal": "Requests of which only the blocks before the first image, sound or "
    "video are cached, because tokens do not identify the rest.",
    "bypassed_inputs": "Requests computed without the cache, because they have prompt embeddings, "
    "belong to a streaming session, or hold token ids that no vocabulary has.",
    "bypassed_unsalted": "Requests computed without the cache, because they have no cache_salt, "
    "and the connector's require_salt is set.",
    "hints": "Hints sent to the daemon for finished requests.",
    "hints_failed": "Hints that did not reach the daemon, or that it refused.",
    "hints_ignored": "Requests whose hints could not be read.",
    "breaker_trips": "Times a client of this engine stopped asking a daemon that did not answer.",
}

GAUGES = {
    "breakers_open": "Clients of this engine (scheduler, workers) that refuse calls, because "
    "the daemon does not answer.",
}
"""Reported as changes, so that those of all processes and steps simply add up."""


class Counters:
    """Counters of one side of the connector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._breaker_open = False
        self._breaker_trips = 0
        self.totals: dict[str, float] = dict.fromkeys([*COUNTERS, *GAUGES], 0)

    def add(self, **counts: float) -> None:
        """Add to the named counters. An unknown name is a KeyError."""
        with self._lock:
            for name, count in counts.items():
                self.totals[name] += count
                self._since[name] = self._since.get(name, 0) + count

    def note_breaker(self, *, available: bool, trips: int) -> None:
        """Add what has changed in the state of a client's circuit breaker. One thread calls it."""
        if trips != self._breaker_trips:
            self.add(breaker_trips=trips - self._breaker_trips)
            self._breaker_trips = trips
        if self._breaker_open == available:
            self._breaker_open = not available
            self.add(breakers_open=1 if self._breaker_open else -1)

    def take(self) -> dict[str, float]:
        """Return what was added since the last call, by name."""
        with self._lock:
            since, self._since = self._since, {}
        return since
