"""Hit ratio over size, from the results of a replay."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.model.words import size
from kvstore.replay import Result

TICKS_MAX = 8


def check_matplotlib() -> None:
    """Raise ClickException if it is missing: before a replay that may take minutes."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs matplotlib ({error}): pip install 'kvstore-tiers[bench]'"
        ) from error


def plot_results(results: Sequence[Result], target: Path, *, title: str) -> None:
    """Draw a line per policy, the offline optimum and the infinite cache over the room there is.

    Raises ClickException if the file cannot be written.
    """
    figure = draw_results(results, title=title)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{target}: cannot be written: {error}") from error


def draw_results(results: Sequence[Result], *, title: str) -> Any:
    """Return the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for result in results:
        room = _room(result)
        names = dict.fromkeys((result.setup.dram_policy, result.setup.file_policy))
        lines["/".join(names)][room] = 100 * result.token_hit_ratio
        lines["offline optimum"][room] = 100 * result.optimum
    for name, points in lines.items():
        dashed = "--" if name == "offline optimum" else "-"
        axes.plot(*zip(*sorted(points.items()), strict=True), dashed, marker=".", label=name)
    axes.axhline(100 * results[0].infinite, color="grey", lw=1, ls=":", label="infinite cache")
    axes.set(title=title, xscale="log", xlabel="room of all tiers, and its share of all blocks")
    shares = {_room(result): _share(result) for result in results}
    ticks = list(_spread(sorted(room for room in shares if room > 0)))
    axes.set_xticks(ticks, [f"{size(room)}\n{shares[room]:.3g} %" for room in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylabel("tokens hit")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _spread(rooms: Sequence[int]) -> Iterable[int]:
    """Yield those whose labels do not touch on a logarithmic axis."""
    if not rooms:
        return
    apart = math.log(rooms[-1] / rooms[0]) / TICKS_MAX
    last = 0.0
    for room in rooms:
        if room == rooms[0] or math.log(room) - last >= apart:
            yield room
            last = math.log(room)


def _room(result: Result) -> int:
    setup = result.setup
    return setup.dram_blocks * setup.record_nbytes + setup.file_blocks * setup.file_record_nbytes


def _share(result: Result) -> float:
    blocks = result.setup.dram_blocks + result.setup.file_blocks
    return 100 * blocks / max(1, result.unique_blocks)
