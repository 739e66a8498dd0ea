"""Hit ratio over size, from the results of a replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from kvstore.replay import Result


def plot_results(results: Sequence[Result], target: Path, *, title: str) -> None:
    """Draw a line per policy, the offline optimum and the infinite cache over the room there is.

    Raises ClickException if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs matplotlib ({error}): pip install 'kvstore-tiers[bench]'"
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines: dict[str, dict[float, float]] = defaultdict(dict)
    for result in results:
        share = _share(result)
        names = dict.fromkeys((result.setup.dram_policy, result.setup.file_policy))
        lines["/".join(names)][share] = 100 * result.token_hit_ratio
        lines["offline optimum"][share] = 100 * result.optimum
    for name, points in lines.items():
        dashed = "--" if name == "offline optimum" else "-"
        axes.plot(*zip(*sorted(points.items()), strict=True), dashed, marker=".", label=name)
    axes.axhline(100 * results[0].infinite, color="grey", lw=1, ls=":", label="infinite cache")
    axes.set(
        title=title,
        xscale="log",
        xlabel="room of all tiers [% of the trace's blocks]",
        ylabel="token hit ratio [%]",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{target}: cannot be written: {error}") from error


def _share(result: Result) -> float:
    blocks = result.setup.dram_blocks + result.setup.file_blocks
    return 100 * blocks / max(1, result.unique_blocks)
