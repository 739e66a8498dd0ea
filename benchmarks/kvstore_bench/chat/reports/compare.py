"""Two results of `kvstore bench chat`: what differs between the runs, and by how much.

    document = compare(load("without.json"), load("with.json"))
    for metric in document["points"][0]["metrics"]:
        print(metric["metric"], metric["ratio"], metric["ratio_ci"])

Latencies are resampled by conversation, throughput by slices of time (bootstrap.py). Runs that did
not do the same work, or left turns of it unanswered, are refused, because their numbers do not
compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.reports.bootstrap import (
    Counts,
    Estimate,
    clustered,
    draw_counts,
    estimate,
    rate_draws,
)
from kvstore_bench.chat.reports.report import SCHEMA_VERSION

MEASURES = ("ttft", "itl", "tpot", "e2el")
STATISTICS: Mapping[str, float | None] = {"mean": None, "median": 50.0, "p90": 90.0, "p99": 99.0}
RATES = ("request_throughput", "output_throughput")
CONVERSATIONS_MIN = 5
SLICES_MAX = 20
SLICES_MIN = 5
# What must be the same for two runs to have done the same work.
LOAD = (
    "endpoint", "answers", "order", "concurrency", "request_rate", "client_rate", "arrivals",
    "turns", "max_tokens", "min_tokens", "ignore_eos", "temperature", "body", "warmup",
    "warmup_percent", "seed",
)  # fmt: skip


class Request(msgspec.Struct):
    """One request of a result."""

    conversation_id: str
    start_time_ms: float
    latency_ms: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: list[float] = []
    output_num_tokens: int | None = None
    error: Any = None
    warmup: bool = False


class Run(msgspec.Struct):
    """What is read of one run. skipped: turns that were never answered nor failed."""

    model_id: str
    options: dict[str, Any]
    workload: dict[str, Any]
    requests: list[Request]
    skipped: int = 0
    interrupted: bool = False
    name: str = ""

    def measured(self) -> list[Request]:
        """Return the requests that count."""
        return [one for one in self.requests if one.error is None and not one.warmup]

    @property
    def failed(self) -> int:
        """How many requests failed, those of the warm-up included."""
        return sum(one.error is not None for one in self.requests)


class _File(msgspec.Struct):
    schema_version: int
    points: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Settings:
    """How intervals are made."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0


def load(path: Path) -> list[Run]:
    """Read a result: one run, or the points of a series. Raises InvalidRequest."""
    try:
        data = path.read_bytes()
        file = msgspec.json.decode(data, type=_File)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: no result of `kvstore bench chat`: {error}") from error
    if file.schema_version != SCHEMA_VERSION:
        version = f"schema version {file.schema_version}, known is {SCHEMA_VERSION}"
        raise InvalidRequest(f"{path}: {version}")
    try:
        if bytes(file.points):
            return msgspec.json.decode(file.points, type=list[Run])
        return [msgspec.json.decode(data, type=Run)]
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path}: no result of `kvstore bench chat`: {error}") from error


def differences(a: Run, b: Run) -> list[str]:
    """Say what of the work differs between two runs; empty if nothing does."""
    found = list(_unlike("", {"model_id": a.model_id}, {"model_id": b.model_id}))
    if a.workload.get("sha256") != b.workload.get("sha256"):
        rest = [{k: v for k, v in run.workload.items() if k != "sha256"} for run in (a, b)]
        found += list(_unlike("workload.", *rest)) or ["workload: same parameters, other content"]
    loads = [{name: run.options.get(name) for name in LOAD} for run in (a, b)]
    found += _unlike("", *loads)
    for name, run in (("A", a), ("B", b)):
        if run.interrupted:
            found.append(f"{name} was interrupted")
        if run.failed or run.skipped:  # the slowest often: without them a side looks faster
            turns = len(run.requests) + run.skipped
            found.append(f"{name}: of {turns} turns, {run.failed} failed, {run.skipped} missing")
    return found


def compare(
    a: list[Run], b: list[Run], *, force: bool = False, settings: Settings | None = None
) -> dict[str, Any]:
    """Compare runs point by point; JSON-ready. Raises InvalidRequest for unlike work.

    Ratios are b / a. An interval is null where there is too little data.
    """
    settings = settings or Settings()
    names = [run.name for run in a]
    if names != [run.name for run in b]:
        raise InvalidRequest(
            f"the files hold different runs: {_list(names)}, and {_list(run.name for run in b)}"
        )
    unlike = {one.name: differences(one, other) for one, other in zip(a, b, strict=True)}
    if any(unlike.values()) and not force:
        lines = [
            f"  {name + ': ' if name else ''}{line}" for name in names for line in unlike[name]
        ]
        raise InvalidRequest(
            "A and B did not do the same work (--force compares all the same):\n" + "\n".join(lines)
        )
    points = [_point(one, other, settings) for one, other in zip(a, b, strict=True)]
    return {
        "confidence": settings.confidence,
        "resamples": settings.resamples,
        "seed": settings.seed,
        "points": [
            {"name": name, "differences": unlike[name], **point}
            for name, point in zip(names, points, strict=True)
        ],
    }


def _unlike(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield f"{prefix}{name}: {a.get(name)!r} in A, {b.get(name)!r} in B"


def _list(names: Any) -> str:
    return ", ".join(name or "one run" for name in names)


def _point(a: Run, b: Run, settings: Settings) -> dict[str, Any]:
    requests = (a.measured(), b.measured())
    names = tuple(sorted({one.conversation_id for one in run}) for run in requests)
    paired = names[0] == names[1]
    random = np.random.default_rng(settings.seed)
    metrics: list[dict[str, Any]] = []
    if all(requests):
        counts = draw_counts(random, len(names[0]), settings.resamples)
        other = counts if paired else draw_counts(random, len(names[1]), settings.resamples)
        for measure in MEASURES:
            metrics += _latency(measure, requests, names, (counts, other), settings)
        metrics += _throughput(requests, random, settings)
    return {
        "requests": [len(run) for run in requests],
        "failed": [a.failed, b.failed],
        "skipped": [a.skipped, b.skipped],
        "conversations": [len(run) for run in names],
        "paired": paired,
        "metrics": metrics,
    }


def _latency(
    measure: str,
    requests: tuple[list[Request], list[Request]],
    names: tuple[list[str], ...],
    counts: tuple[Counts, Counts],
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    sides = []
    for run, known in zip(requests, names, strict=True):
        pairs = [(value, one.conversation_id) for one in run for value in _values(one, measure)]
        if not pairs:
            return
        sides.append(clustered([v for v, _ in pairs], [name for _, name in pairs], known))
    percents = list(STATISTICS.values())
    drawn = [side.draws(drawn, percents) for side, drawn in zip(sides, counts, strict=True)]
    # Resamples of a few conversations say nothing about conversations at large.
    if min(side.clusters for side in sides) < CONVERSATIONS_MIN:
        drawn = [[np.full(len(one), math.nan) for one in columns] for columns in drawn]
    for (name, percent), *draws in zip(STATISTICS.items(), *drawn, strict=True):
        values = (sides[0].value(percent), sides[1].value(percent))
        yield _metric(f"{name}_{measure}_ms", values, draws, settings)


def _values(request: Request, measure: str) -> list[float]:
    if measure == "itl":
        return request.itl_ms
    value = {
        "ttft": request.ttft_ms, "tpot": request.tpot_ms, "e2el": request.latency_ms,
    }[measure]  # fmt: skip
    return [] if value is None else [value]


def _throughput(
    requests: tuple[list[Request], list[Request]], random: np.random.Generator, settings: Settings
) -> Iterator[dict[str, Any]]:
    slices = min(SLICES_MAX, *(len(run) // 2 for run in requests))
    for name in RATES:
        values, draws = [], []
        for run in requests:
            first = min(one.start_time_ms for one in run)
            ends_s = np.array([(one.start_time_ms + one.latency_ms - first) / 1e3 for one in run])
            tokens = [float(one.output_num_tokens or 0) for one in run]
            amounts = np.array([1.0] * len(run) if name == RATES[0] else tokens)
            duration_s = max(float(ends_s.max()), 1e-6)
            values.append(float(amounts.sum()) / duration_s)
            if slices < SLICES_MIN:
                draws.append(np.full(settings.resamples, math.nan))
                continue
            counts = draw_counts(random, slices, settings.resamples)
            draws.append(rate_draws(ends_s, amounts, duration_s, slices=slices, counts=counts))
        yield _metric(name, (values[0], values[1]), draws, settings)


def _metric(
    name: str, values: tuple[float, float], draws: list[Any], settings: Settings
) -> dict[str, Any]:
    difference, ratio = estimate(draws[0], draws[1], values, settings.confidence)
    return {
        "metric": name,
        "a": values[0],
        "b": values[1],
        **_fields("difference", difference),
        **_fields("ratio", ratio),
    }


def _fields(name: str, found: Estimate) -> dict[str, Any]:
    value = found.value if math.isfinite(found.value) else None
    return {name: value, f"{name}_ci": list(found.interval) if found.interval else None}
