"""The plot of a run: TTFT by length of the prompt, and what the tiers held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvstore_bench.long.course import Answered
from kvstore_bench.long.snapshots import Snapshot

PHASES = {"cold": "#D55E00", "dram": "#0072B2", "file": "#009E73", "restart": "#CC79A7"}
OWN = "#999999"
MIB = 1 << 20
HELD = {
    "dram_bytes": "in DRAM",
    "leased_bytes": "leased to engines",
    "dirty_bytes": "not written yet",
    "file_bytes": "in files",
}


def plot(
    answered: Sequence[Answered], snapshots: Sequence[Snapshot], target: Path, *, title: str
) -> None:
    """Draw both into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2)
    _draw_ttft(above, answered)
    _draw_tiers(below, snapshots)
    figure.suptitle(title)
    figure.savefig(target, dpi=120)


def _draw_ttft(axes: Any, answered: Sequence[Answered]) -> None:
    lengths = sorted({each.length for each in answered})
    for phase, colour in PHASES.items():
        points = [
            median(e.ttft_s for e in answered if (e.phase, e.length) == (phase, length))
            for length in lengths
        ]
        axes.plot(lengths, points, marker="o", color=colour, label=phase)
    own = [median(e.own_ttft_s for e in answered if e.length == length) for length in lengths]
    axes.plot(lengths, own, marker="o", color=OWN, label="engine's own device hit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length >> 10}k" for length in lengths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token, s")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _draw_tiers(axes: Any, snapshots: Sequence[Snapshot]) -> None:
    at = [each.at_s for each in snapshots]
    for name, label in HELD.items():
        axes.plot(at, [getattr(each, name) / MIB for each in snapshots], label=label)
    cap = [each.dram_capacity_bytes / MIB for each in snapshots]
    axes.plot(at, cap, color="black", linestyle=":", label="cap of DRAM")
    before = ""
    for each in snapshots:
        if each.phase != before:
            axes.axvline(each.at_s, color="#dddddd", linewidth=0.8, zorder=0)
            axes.annotate(each.phase, (each.at_s, axes.get_ylim()[1]), rotation=90, fontsize=7)
            before = each.phase
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper left", fontsize=8)
