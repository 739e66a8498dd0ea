"""What the server itself counted during a run: its Prometheus page before and after.

Only what the page shows is reported. A counter that is absent is None with a note that says so,
and a counter that went backwards (the server was restarted in between) makes the page's numbers
worthless, which is noted too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
Counters = Mapping[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Differences over the run; None where the server has no such counter.

    prompt_tokens_by_source: where prompt tokens came from (vLLM: local_compute, local_cache_hit,
    external_kv_transfer). cached_tokens_by_source: where cached ones came from (device, host,
    disk, ...). kvstore: the daemon's own counters that moved, keyed as Prometheus writes them.
    notes: what could not be measured, and why.
    """

    prompt_tokens_by_source: Mapping[str, float] | None = None
    cached_tokens_by_source: Mapping[str, float] | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    external_prefix_cache_queries: float | None = None
    external_prefix_cache_hits: float | None = None
    preemptions: float | None = None
    kvstore: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()


def parse_counters(text: str) -> Counters | None:
    """Read every counter of a Prometheus page; None if the text is no such page."""
    counters: dict[tuple[str, Labels], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.type != "counter":
                continue
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counters[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError:
        return None
    return counters


def difference(before: Counters, after: Counters) -> Counters | None:
    """Subtract; a counter that was not there before counts from 0. None if one went backwards."""
    changes = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return None if any(change < 0 for change in changes.values()) else changes


def server_counts(before: Counters | str, after: Counters | str) -> ServerCounts:
    """Name the changes of an engine's page; a str in place of counters says why there are none."""
    changes, note = _changes(before, after)
    if changes is None:
        return ServerCounts(notes=(f"server metrics: {note}",))
    sources = _by_source(changes, "vllm:prompt_tokens_by_source_total")
    missing = "server metrics: no vllm:prompt_tokens_by_source_total, so hit sources are unknown"
    return ServerCounts(
        prompt_tokens_by_source=sources,
        cached_tokens_by_source=_by_source(changes, "vllm:prompt_tokens_cached_by_source_total"),
        prefix_cache_queries=_total(changes, "vllm:prefix_cache_queries_total"),
        prefix_cache_hits=_total(changes, "vllm:prefix_cache_hits_total"),
        external_prefix_cache_queries=_total(changes, "vllm:external_prefix_cache_queries_total"),
        external_prefix_cache_hits=_total(changes, "vllm:external_prefix_cache_hits_total"),
        preemptions=_total(changes, "vllm:num_preemptions_total"),
        notes=(missing,) if sources is None else (),
    )


def kvstore_counts(before: Counters | str, after: Counters | str) -> dict[str, float] | str:
    """Return the daemon's kvstore_* counters that moved, or why they are unknown."""
    changes, note = _changes(before, after)
    if changes is None:
        return f"kvstore metrics: {note}"
    return {
        _written(name, labels): value
        for (name, labels), value in sorted(changes.items())
        if name.startswith("kvstore_") and value
    }


def _changes(before: Counters | str, after: Counters | str) -> tuple[Counters | None, str]:
    if isinstance(before, str) or isinstance(after, str):
        return None, before if isinstance(before, str) else str(after)
    changes = difference(before, after)
    return changes, "counters went backwards (restarted during the run), nothing to compare"


def _total(changes: Counters, wanted: str) -> float | None:
    values = [value for (name, _), value in changes.items() if name == wanted]
    return sum(values) if values else None


def _by_source(changes: Counters, wanted: str) -> dict[str, float] | None:
    sums: dict[str, float] = {}
    for (name, labels), value in changes.items():
        if name == wanted:
            source = dict(labels).get("source", "")
            sums[source] = sums.get(source, 0.0) + value
    return sums or None


def _written(name: str, labels: Labels) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in labels)
    return f"{name}{{{inner}}}" if inner else name
