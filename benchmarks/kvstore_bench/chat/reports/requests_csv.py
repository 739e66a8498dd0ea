"""One line a request, for spreadsheets and for scripts made for LMCache's `multi-round-qa`.

Its eight columns come first, under its names and in its units (seconds; launch and finish by the
wall clock). What was not measured is empty.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore_bench.chat.reports.result import Result
from kvstore_bench.chat.sample import Sample

COLUMNS = (
    "prompt_tokens", "generation_tokens", "ttft", "generation_time", "user_id", "question_id",
    "launch_time", "finish_time", "latency", "tpot", "queue_time", "cached_tokens", "chunks",
    "warmup", "error", "point",
)  # fmt: skip


def write(target: Path, results: dict[str, Result]) -> None:
    """Write every request of one run, or of several by the name of their point."""
    with target.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for name, result in results.items():
            table.writerows(_rows(name, result))


def _rows(name: str, result: Result) -> Iterator[list[Any]]:
    measured = {id(sample) for sample in result.measured}
    for sample in result.requests:
        row = _row(sample, result.started_unix_s)
        yield [*row, int(id(sample) not in measured), _error(sample), name]


def _row(sample: Sample, start_s: float) -> list[Any]:
    launch_s = start_s + sample.started_s
    generation_s = None if sample.ttft_s is None else sample.latency_s - sample.ttft_s
    seconds = (sample.ttft_s, generation_s)
    return [
        sample.input_tokens,
        sample.output_tokens,
        *map(_seconds, seconds),
        sample.conversation_id,
        sample.turn,
        *map(_seconds, (launch_s, launch_s + sample.latency_s, sample.latency_s)),
        *map(_seconds, (sample.tpot_s, sample.queued_s)),
        sample.cached_tokens,
        sample.output_chunks,
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _error(sample: Sample) -> str:
    return f"{sample.failure.label}: {sample.failure.message}" if sample.failure else ""
