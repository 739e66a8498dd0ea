"""What a person sees of one run or of several: the JSON document, the table, the picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvstore_bench.chat.points import Point
from kvstore_bench.chat.reports.report import SCHEMA_VERSION
from kvstore_bench.chat.reports.result import Result

PIPED_COLUMNS = 120


def document(points: Sequence[Point], reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one run's report as it is, several as {"points": [{"name", "axes", ...report}]}."""
    if not points[0].axes:
        return reports[points[0].name]
    axes = {point.name: dict(point.axes) for point in points}
    return {
        "schema_version": SCHEMA_VERSION,
        "axes": list(points[0].axes),
        "points": [{"name": name, "axes": axes[name], **one} for name, one in reports.items()],
    }


def console() -> Any:
    """Return a rich console for stdout."""
    from rich.console import Console

    # Without a terminal rich assumes 80 columns, too few for the tables.
    return Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def print_document(shown: Mapping[str, Any]) -> None:
    """Print the table of one run, or a line a point."""
    from kvstore_bench.chat.reports.table import print_points, print_report

    if "points" in shown:
        print_points(shown, console())
    else:
        print_report(shown, console())


def plot(
    points: Sequence[Point],
    results: Mapping[str, Result],
    shown: Mapping[str, Any],
    target: Path,
) -> None:
    """Draw one run's requests, a sweep's lines, or a grid's heat maps."""
    from kvstore_bench.chat.reports import plot, plot_points

    samples = [sample for result in results.values() for sample in result.measured]
    if all(sample.failure for sample in samples):
        click.echo(f"{target}: not drawn, no request completed", err=True)
    elif "points" not in shown:
        (result,) = results.values()
        plot.plot_run({"": result.measured}, target, title=_title(result))
    elif len(shown["axes"]) == 1:
        plot_points.plot_sweep(shown, target)
    else:
        plot_points.plot_grid(shown, target)


def _title(result: Result) -> str:
    options = result.options
    rate = options.request_rate or options.client_rate
    load = f"{options.concurrency or 1} in flight"
    if rate:
        load = f"{rate:g} requests/s{' a client' if options.client_rate else ''}"
    elif result.workload.dialogues[0].due_s(1) is not None:
        load = "at recorded times"
    return f"{result.model}: {len(result.measured)} requests, {options.order}, {load}"
