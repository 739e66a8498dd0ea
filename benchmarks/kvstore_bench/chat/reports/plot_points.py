"""Pictures of several runs: lines over the load of a sweep, heat maps over a grid of lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.reports.plot import COLOURS, finish, from_zero, new_figure, save

LABELS = {"concurrency": "conversations in flight", "request_rate": "requests/s asked for"}
HEAT_MAPS = {
    "p50_ttft_ms": "median TTFT [ms]",
    "mean_tpot_ms": "mean TPOT [ms]",
    "output_throughput": "output tokens/s",
}


def plot_sweep(document: Mapping[str, Any], target: Path) -> None:
    """Draw TTFT, TPOT and throughput over the axis of a sweep."""
    (axis,) = document["axes"]
    points = sorted(_completed(document), key=lambda point: point["axes"][axis])
    places = [point["axes"][axis] for point in points]
    figure, (ttft, tpot, rate) = new_figure(3, width=15)
    for panel, measure, title in ((ttft, "ttft", "TTFT"), (tpot, "tpot", "TPOT")):
        for number, statistic in enumerate(("p50", "p90", "p99")):
            values = [point[f"{statistic}_{measure}_ms"] for point in points]
            _line(panel, places, values, statistic, number)
        panel.set(title=title, ylabel="ms")
    _line(rate, places, [p["request_throughput"] for p in points], "throughput", 0)
    _line(rate, places, [p["request_goodput"] for p in points], "goodput", 1)
    rate.set(title="Throughput", ylabel="requests/s")
    for panel in (ttft, tpot, rate):
        panel.set_xlabel(LABELS[axis])
        from_zero(panel)
        finish(panel)
    save(figure, target, f"{points[0]['model_id']}: {points[0]['completed']} requests a point")


def plot_grid(document: Mapping[str, Any], target: Path) -> None:
    """Draw a heat map a measure, input length upwards, output length to the right."""
    points = _completed(document)
    down, across = (sorted({point["axes"][axis] for point in points}) for axis in document["axes"])
    figure, panels = new_figure(len(HEAT_MAPS), width=5 * len(HEAT_MAPS))
    for panel, (key, title) in zip(panels, HEAT_MAPS.items(), strict=True):
        _heat_map(figure, panel, points, axes=document["axes"], ticks=(down, across), key=key)
        panel.set(title=title, xlabel="output tokens", ylabel="input tokens")
    save(figure, target, points[0]["model_id"])


def _completed(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    points = [point for point in document["points"] if point["completed"]]
    if not points:
        raise InvalidRequest("nothing to plot: no request completed")
    return points


def _line(
    panel: Any, places: Sequence[float], values: Sequence[float | None], label: str, number: int
) -> None:
    known = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
    if known:
        xs, ys = zip(*known, strict=True)
        panel.plot(xs, ys, marker="o", markersize=4, color=COLOURS[number], label=label)


def _heat_map(
    figure: Any,
    panel: Any,
    points: Sequence[Mapping[str, Any]],
    *,
    axes: Sequence[str],
    ticks: tuple[Sequence[int], Sequence[int]],
    key: str,
) -> None:
    down, across = ticks
    cells = [[float("nan")] * len(across) for _ in down]
    for point in points:
        row, column = down.index(point["axes"][axes[0]]), across.index(point["axes"][axes[1]])
        cells[row][column] = float("nan") if point[key] is None else point[key]
    image = panel.imshow(cells, origin="lower", aspect="auto", cmap="viridis", vmin=0)
    panel.set_xticks(range(len(across)), [f"{tokens:,}" for tokens in across])
    panel.set_yticks(range(len(down)), [f"{tokens:,}" for tokens in down])
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if not math.isnan(value):
                box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
                panel.text(column, row, f"{value:,.1f}", ha="center", va="center", bbox=box)
    figure.colorbar(image, ax=panel)
