"""The results of `kvstore replay` as lines, as JSON and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.model.words import rounded, size
from kvstore.replay import Result, Workload
from kvstore.replay.bounds import Bounds


def about(workload: Workload, nbytes: int, bounds: Bounds) -> Iterator[str]:
    yield (
        f"{workload.name} ({workload.format}): {len(workload.requests):,} requests in"
        f" {rounded(workload.seconds / 3600)} h, {workload.tokens:,} prompt tokens"
    )
    yield (
        f"{workload.unique_blocks:,} blocks of {workload.block_tokens} tokens,"
        f" {size(workload.unique_blocks * nbytes)} of KV"
    )
    yield f"an infinite cache hits {100 * bounds.infinite():.2f} % of the tokens"
    if workload.skipped:
        yield f"skipped {workload.skipped:,} broken lines; the first: line {workload.first_skipped}"


_COLUMNS = (
    ("dram", 10), ("file", 10), ("policy", 8), ("hit %", 7), ("dram %", 7), ("file %", 7),
    ("optimum", 8), ("of it", 7), ("writes/unique", 14), ("file read", 11), ("file written", 13),
    ("promoted", 9), ("wasted", 7), ("saved PFLOP", 11), ("blocks/s", 10),
)  # fmt: skip


def lines(result: Result, *, with_head: bool) -> Iterator[str]:
    if with_head:
        yield ""
        yield " ".join(f"{name:>{width}}" for name, width in _COLUMNS)
    setup, traffic = result.setup, result.traffic
    policies = dict.fromkeys(
        (setup.dram_policy, setup.file_policy) if setup.file_blocks else (setup.dram_policy,)
    )
    reached = result.token_hit_ratio / result.optimum if result.optimum else 1.0
    cells = (
        size(setup.dram_blocks * setup.record_nbytes),
        size(setup.file_blocks * setup.file_record_nbytes) if setup.file_blocks else "-",
        "/".join(policies),
        f"{100 * result.token_hit_ratio:.2f}",
        f"{100 * result.dram_hit_ratio:.2f}",
        f"{100 * result.file_hit_ratio:.2f}" if setup.file_blocks else "-",
        f"{100 * result.optimum:.2f}",
        f"{100 * reached:.1f} %",
        f"{result.writes_per_unique:.3f}" if setup.file_blocks else "-",
        size(traffic.file_reads * setup.file_record_nbytes) if setup.file_blocks else "-",
        size(result.written_blocks * setup.file_record_nbytes) if setup.file_blocks else "-",
        f"{traffic.promotions_used:,}" if setup.file_blocks else "-",
        f"{traffic.promotions_wasted:,}" if setup.file_blocks else "-",
        f"{result.saved_flops / 1e15:,.1f}" if result.saved_flops is not None else "-",
        f"{result.blocks_per_s:,.0f}",
    )
    yield " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def gain_line(result: Result, unaware: Result) -> str:
    """Say what knowing the costs of the models of a mix has saved."""
    saved, before = result.saved_s or 0.0, unaware.saved_s or 1.0
    each = ", ".join(
        f"{model.model} {100 * model.hit_tokens / max(1, model.tokens):.2f} %"
        f" (unaware {100 * other.hit_tokens / max(1, other.tokens):.2f} %)"
        for model, other in zip(result.models, unaware.models, strict=True)
    )
    return (
        f"    {saved:,.0f} s of prefill saved, {before:,.0f} s without costs:"
        f" {saved / before:.3f} times as much. Hits: {each}"
    )


def as_dict(workload: Workload, result: Result) -> dict[str, Any]:
    about = {"trace": workload.name, "format": workload.format, "skipped": workload.skipped}
    return result.to_dict() | about


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            names = dict.fromkeys(name for row in rows for name in row)
            table = csv.DictWriter(file, list(names))
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from error
