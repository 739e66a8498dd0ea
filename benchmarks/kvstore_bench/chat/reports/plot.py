"""Pictures of runs: TTFT by turn, TTFT by prompt length, ITL by position in the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.sample import Sample

# Okabe and Ito's palette: tells apart for the colour-blind, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SPREAD_TURNS = 0.5


def plot_run(
    runs: Mapping[str, Sequence[Sample]], target: Path, *, title: str | None = None
) -> None:
    """Draw up to six runs, by label, into a PNG (or what the suffix says: svg, pdf).

    Failed requests are not drawn. Raises InvalidRequest if nothing can be drawn or written.
    """
    runs = {label: [s for s in samples if _drawable(s)] for label, samples in runs.items()}
    if not any(runs.values()) or len(runs) > len(COLOURS):
        raise InvalidRequest("nothing to plot: no request completed, or more than six runs")
    figure, (by_turn, by_length, by_position) = new_figure(3, width=16)
    by_turn.sharey(by_length)
    _draw_by_turn(by_turn, runs)
    _draw_by_length(by_length, runs)
    from_zero(by_turn)
    _draw_by_position(by_position, runs)
    save(figure, target, title)


def new_figure(panels: int, *, width: float) -> tuple[Any, Any]:
    """Return a figure and its panels, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own instead of pyplot: no global state, no display, nothing to close.
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels)


def save(figure: Any, target: Path, title: str | None) -> None:
    """Write a figure in the format of the suffix. Raises InvalidRequest if it cannot be written."""
    if title:
        figure.suptitle(title)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{target}: cannot be written: {error}") from error


def _drawable(sample: Sample) -> bool:
    return sample.failure is None and sample.ttft_s is not None


def _draw_by_turn(axes: Any, runs: Mapping[str, Sequence[Sample]]) -> None:
    """Draw every request, beside each other within its turn, and a line through the medians."""
    width = SPREAD_TURNS / len(runs)
    for number, (label, samples) in enumerate(runs.items()):
        by_turn: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            by_turn[sample.turn].append(_ttft_ms(sample))
        centre = (number - (len(runs) - 1) / 2) * width
        for turn, values in by_turn.items():
            places = [turn + centre + width * _offset(i, len(values)) for i in range(len(values))]
            axes.scatter(places, values, s=14, alpha=0.45, color=COLOURS[number], linewidths=0)
        turns = sorted(by_turn)
        medians = [median(by_turn[turn]) for turn in turns]
        places = [turn + centre for turn in turns]
        name = f"{label}: median" if label else "median"
        axes.plot(
            places,
            medians,
            marker="_",
            markersize=14,
            markeredgewidth=2,
            color=COLOURS[number],
            label=name,
        )
    axes.set(title="TTFT by turn", xlabel="turn of the conversation", ylabel="TTFT [ms]")
    axes.xaxis.get_major_locator().set_params(integer=True)
    finish(axes)


def _draw_by_length(axes: Any, runs: Mapping[str, Sequence[Sample]]) -> None:
    """Draw TTFT over input tokens; a single run is split into first and resumed turns."""
    series = dict(runs)
    if len(runs) == 1:
        (samples,) = runs.values()
        series = {
            "first turns": [sample for sample in samples if not sample.resumed],
            "resumed turns": [sample for sample in samples if sample.resumed],
        }
    for number, (label, samples) in enumerate(series.items()):
        known = [sample for sample in samples if sample.input_tokens is not None]
        if known:
            tokens = [sample.input_tokens for sample in known]
            values = [_ttft_ms(sample) for sample in known]
            axes.scatter(tokens, values, s=18, alpha=0.6, color=COLOURS[number], label=label)
    axes.set(title="TTFT by prompt length", xlabel="input tokens", ylabel="TTFT [ms]")
    axes.set_xlim(left=0)
    finish(axes)


def _draw_by_position(axes: Any, runs: Mapping[str, Sequence[Sample]]) -> None:
    """Draw the median gap before each piece of an answer, and the range of most of them."""
    for number, (label, samples) in enumerate(runs.items()):
        rows: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            for position, gap_s in enumerate(sample.itl_s, 2):
                rows[position].append(1e3 * gap_s)
        if not rows:
            continue
        positions = sorted(rows)
        low, middle, high = zip(
            *(np.percentile(rows[position], (10, 50, 90)) for position in positions), strict=True
        )
        colour = COLOURS[number]
        axes.fill_between(positions, low, high, color=colour, alpha=0.2, linewidth=0)
        name = "median, and p10 to p90"
        axes.plot(positions, middle, color=colour, label=f"{label}: {name}" if label else name)
    axes.set(title="ITL by position", xlabel="piece of the answer", ylabel="ITL [ms]")
    from_zero(axes)
    finish(axes)


def from_zero(axes: Any) -> None:
    """Start the y axis at 0, with room above the highest value."""
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def finish(axes: Any) -> None:
    """Give a panel the looks that all share."""
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _offset(index: int, count: int) -> float:
    """Place values of one turn evenly from -0.4 to 0.4, so that equal ones stay visible."""
    return 0.8 * (index / (count - 1) - 0.5) if count > 1 else 0.0


def _ttft_ms(sample: Sample) -> float:
    assert sample.ttft_s is not None  # _drawable
    return 1e3 * sample.ttft_s
