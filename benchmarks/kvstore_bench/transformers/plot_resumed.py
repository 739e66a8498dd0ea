"""The picture of `kvstore bench transformers`: time to first token by where the prefix was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from kvstore_bench.chat.reports.plot import COLOURS, new_figure, save
from kvstore_bench.transformers.resumed import SOURCES


def plot_resumed(result: Mapping[str, Any], target: Path) -> None:
    """Draw a dot for each prompt and a bar for each median into a PNG (or svg, pdf)."""
    seconds = result["seconds"]
    figure, axes = new_figure(1, width=9)
    places = range(len(seconds))
    cold_s = median(seconds["cold"])
    for place, (source, values) in zip(places, seconds.items(), strict=True):
        colour = COLOURS[1] if source == "cold" else COLOURS[0]
        middle = median(values)
        axes.barh(place, middle, height=0.6, color=colour, alpha=0.35)
        axes.scatter(values, [place] * len(values), s=18, color=colour, alpha=0.8, linewidths=0)
        ratio = "" if source == "cold" else f" ({middle / cold_s:.2f} of without)"
        axes.annotate(
            f"{middle:.2f} s{ratio}",
            (max(values), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(places, [SOURCES[source] for source in seconds])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(map(max, seconds.values())))
    axes.set(xlabel="time to first token [s]")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, target, f"A prompt of {result['plan']['prompt_tokens']:,} tokens, asked again")
