"""The picture of a comparison: ratios with their confidence intervals, a panel a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore_bench.chat.reports.plot import COLOURS, new_figure, save

PANELS_MAX = 8


def plot_comparison(document: Mapping[str, Any], target: Path) -> None:
    """Draw B / A of every metric; at most PANELS_MAX points of a series."""
    points = [point for point in document["points"] if point["metrics"]][:PANELS_MAX]
    figure, panels = new_figure(len(points), width=2.5 + 4.5 * len(points))
    for number, (panel, point) in enumerate(
        zip(panels if len(points) > 1 else [panels], points, strict=True)
    ):
        _draw(panel, point, labelled=number == 0)
    confidence = 100 * document["confidence"]
    name = f"B / A with {confidence:g} % intervals: {document['b']} over {document['a']}"
    save(figure, target, name)


def _draw(panel: Any, point: Mapping[str, Any], *, labelled: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    metrics = [metric for metric in reversed(point["metrics"]) if metric["ratio"]]
    for place, metric in enumerate(metrics):
        if metric["ratio_ci"]:
            panel.plot(metric["ratio_ci"], (place, place), color=COLOURS[0], linewidth=2)
        panel.plot(metric["ratio"], place, marker="o", markersize=5, color=COLOURS[0])
    panel.axvline(1.0, color="#999999", linewidth=1)
    names = [metric["metric"] for metric in metrics] if labelled else [""] * len(metrics)
    panel.set_yticks(range(len(metrics)), names)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    panel.set(title=point["name"], xlabel="B / A, logarithmic")
    panel.grid(axis="x", alpha=0.3)
    panel.spines[["top", "right", "left"]].set_visible(False)
