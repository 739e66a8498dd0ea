"""`kvstore bench compare`: two results side by side, with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from kvstore_bench.chat.options import PLOT
from kvstore_bench.console.exits import check_targets, explained, need, needs

RESULT = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Compare two results of `bench chat`.")
@click.argument("a", type=RESULT)
@click.argument("b", type=RESULT)
@click.option("--force", is_flag=True, help="Also compare runs that did not do the same work.")
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Level of the intervals.",
)
@click.option(
    "--resamples", type=click.IntRange(100, 100_000), default=2000, show_default=True,
    help="Bootstrap samples; more make the intervals steadier.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of resampling."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of a table.")
@PLOT
def compare(a: Path, b: Path, **given: Any) -> None:
    """Compare result B with result A, both written by `kvstore bench chat --output`.

    It prints differences B - A and ratios B / A of TTFT, ITL, TPOT, latency and throughput, with
    bootstrap confidence intervals. It resamples conversations, not requests, because the turns of a
    conversation depend on each other. Fewer than 5 conversations give no intervals. It refuses runs
    that did not do the same work, and says what differs.

    \b
    Examples:
      kvstore bench compare without.json with.json --plot ratios.png
      kvstore bench compare without.json with.json --json > comparison.json
    """
    from kvstore_bench.chat.reports.compare import Settings, load
    from kvstore_bench.chat.reports.compare import compare as compared

    with explained():
        need(*needs(as_json=given["as_json"], plot=given["plot"]))
        check_targets(given["plot"])
        settings = Settings(given["confidence"], given["resamples"], given["seed"])
        document = compared(load(a), load(b), force=given["force"], settings=settings)
        document = {"a": str(a), "b": str(b), **document}
        if given["as_json"]:
            click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1))
        else:
            _print(document)
        if given["plot"]:
            _plot(document, given["plot"])


def _print(document: Mapping[str, Any]) -> None:
    from kvstore_bench.chat.reports.show import console
    from kvstore_bench.chat.reports.table import print_comparison

    print_comparison(document, console())


def _plot(document: Mapping[str, Any], target: Path) -> None:
    from kvstore_bench.chat.reports.plot_comparison import plot_comparison

    if any(point["metrics"] for point in document["points"]):
        plot_comparison(document, target)
    else:
        click.echo(f"{target}: not drawn, no request completed in both", err=True)
