"""Samples in, numbers out: distributions, rates, and the JSON that `--json` prints.

Keys are named as `vllm bench serve` writes them (`mean_ttft_ms`, `request_throughput`,
`request_goodput`, ...; its `e2el` is the latency), those of a request as vLLM's multi-turn
benchmark does (`input_num_tokens`, ...), so the same scripts read both. A number that was not
measured is null, never zero. Failed requests count in `failed` and `errors` and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvstore_bench.chat.metrics import ServerCounts
from kvstore_bench.chat.sample import Sample

SCHEMA_VERSION = 2
FIRST_ERRORS = 5
SHORTEST_S = 1e-6  # no rate is infinite
MEASURES = ("ttft", "itl", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of at least one value. std is that of the values (divided by n), as vLLM's."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    std: float
    min: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """Describe values; percentiles interpolate linearly. None for no values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
    return Distribution(
        count=len(values),
        mean=float(array.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
    )


@dataclass(frozen=True, slots=True)
class Slo:
    """What makes a request good: TTFT, and mean time per further token, of at most so much."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def holds(self, sample: Sample) -> bool:
        """Say whether a completed request is good."""
        if self.ttft_s is not None and (sample.ttft_s is None or sample.ttft_s > self.ttft_s):
            return False
        return self.itl_s is None or sample.mean_itl_s <= self.itl_s


def summarize(
    samples: Sequence[Sample], *, duration_s: float, server: ServerCounts, slo: Slo | None = None
) -> dict[str, Any]:
    """Return the summary as a JSON-ready dict; first and resumed turns are also told apart."""
    duration_s = max(duration_s, SHORTEST_S)
    done = [sample for sample in samples if sample.failure is None]
    failures = [sample.failure for sample in samples if sample.failure is not None]
    total_input = sum(sample.input_tokens or 0 for sample in done)
    total_output = sum(sample.output_tokens or 0 for sample in done)
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(failures),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": _sum_known(sample.cached_tokens for sample in done),
        "request_throughput": len(done) / duration_s,
        "input_throughput": total_input / duration_s,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        **_goodput(done, len(failures), duration_s, slo or Slo()),
        **_latencies(done),
        "tokens_per_chunk": _tokens_per_chunk(done),
        "first_turns": _part([sample for sample in done if not sample.resumed]),
        "resumed_turns": _part([sample for sample in done if sample.resumed]),
        "without_usage": sum(sample.input_tokens is None for sample in done),
        "without_text": sum(sample.ttft_s is None for sample in done),
        "errors": dict(Counter(failure.label for failure in failures)),
        "http_statuses": dict(Counter(str(f.status) for f in failures if f.status)),
        "first_errors": [f"{f.kind}: {f.message}" for f in failures[:FIRST_ERRORS]],
        "server": {**asdict(server), "notes": list(server.notes)},
    }


def request_record(sample: Sample, *, save_text: bool) -> dict[str, Any]:
    """Return one request as a JSON-ready dict; the answer itself only on demand."""
    record: dict[str, Any] = {
        "conversation_id": sample.conversation_id,
        "turn": sample.turn,
        "input_num_turns": sample.messages,
        "start_time_ms": _ms(sample.started_s),
        "queue_ms": _ms(sample.queued_s),
        "ttft_ms": _ms(sample.ttft_s),
        "latency_ms": _ms(sample.latency_s),
        "tpot_ms": _ms(sample.tpot_s),
        "itl_ms": [_ms(gap) for gap in sample.itl_s],
        "input_num_tokens": sample.input_tokens,
        "output_num_tokens": sample.output_tokens,
        "output_num_chunks": sample.output_chunks,
        "cached_tokens": sample.cached_tokens,
        "output_sha256": sample.output_sha256,
        "error": asdict(sample.failure) if sample.failure else None,
    }
    if save_text:
        record["output_text"] = sample.output_text
    return record


def _part(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "completed": len(samples),
        "total_input_tokens": sum(sample.input_tokens or 0 for sample in samples),
        "total_cached_tokens": _sum_known(sample.cached_tokens for sample in samples),
        **_latencies(samples),
    }


def _goodput(done: Sequence[Sample], failed: int, duration_s: float, slo: Slo) -> dict[str, Any]:
    if slo == Slo():
        return {"request_goodput": None, "slo_attainment": None}
    good = sum(slo.holds(sample) for sample in done)
    asked = len(done) + failed
    return {
        "request_goodput": good / duration_s,
        "slo_attainment": good / asked if asked else None,
    }


def _tokens_per_chunk(done: Sequence[Sample]) -> float | None:
    """Return the mean number of tokens in a piece of text; None without the server's counts."""
    counted = [sample for sample in done if sample.output_tokens and sample.output_chunks]
    if not counted:
        return None
    tokens = sum(sample.output_tokens or 0 for sample in counted)
    return round(tokens / sum(sample.output_chunks for sample in counted), 3)


def _latencies(samples: Sequence[Sample]) -> dict[str, float | None]:
    values: Mapping[str, list[float]] = {
        "ttft": [sample.ttft_s for sample in samples if sample.ttft_s is not None],
        "itl": [gap for sample in samples for gap in sample.itl_s],
        "tpot": [sample.tpot_s for sample in samples if sample.tpot_s is not None],
        "e2el": [sample.latency_s for sample in samples],
    }
    flat: dict[str, float | None] = {}
    for measure in MEASURES:
        found = distribution(values[measure])
        for name in ("mean", "p50", "p90", "p99", "std", "min", "max"):
            flat[f"{name}_{measure}_ms"] = _ms(getattr(found, name)) if found else None
        flat[f"median_{measure}_ms"] = flat[f"p50_{measure}_ms"]
    return flat


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
