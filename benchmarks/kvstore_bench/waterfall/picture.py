"""The plot of a waterfall: a row for each source, its stages one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvstore_bench.waterfall.stages import STAGES

COLOURS = {
    "request": "#999999",
    "lookup": "#0072B2",
    "order": "#56B4E9",
    "load": "#009E73",
    "schedule": "#F0E442",
    "compute": "#D55E00",
    "answer": "#CC79A7",
}


def plot(stages_ms: Mapping[str, Mapping[str, float]], target: Path, *, title: str) -> None:
    """Draw the medians of each source's stages into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.7 * len(stages_ms)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sources = list(stages_ms)[::-1]
    for row, stages in enumerate(stages_ms[source] for source in sources):
        at = 0.0
        for name in STAGES:
            took = stages.get(name, 0.0)
            axes.barh(row, took, left=at, color=COLOURS[name], label=name if not row else None)
            at += took
    axes.set_yticks(range(len(sources)), sources)
    axes.set_xlabel("milliseconds since the request was sent")
    axes.set_title(title)
    axes.legend(ncols=len(STAGES), loc="upper center", bbox_to_anchor=(0.5, -0.25), fontsize=8)
    figure.savefig(target, dpi=120)
