"""The picture of `kvstore bench codec`: how small against how fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore_bench.chat.reports.plot import COLOURS, new_figure, save


def points(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    """Yield (name, ratio, GB/s encoded, GB/s decoded) of each form and each peer."""
    l3, ep = result["l3"], result["ep"]
    yield "L3, exact", l3["ratio"], l3["encode_gb_s"], l3["decode_gb_s"]
    yield "EP, all parts", result["ep88"]["ratio"], ep["encode_gb_s"], ep["decode_gb_s"]
    yield "EP, base", result["ep54"]["ratio"], ep["encode_gb_s"], ep["decode_base_gb_s"]
    for name, each in result["peers"].items():
        yield name, each["ratio"], each["encode_gb_s"], each["decode_gb_s"]


def plot_codec(result: Mapping[str, Any], target: Path) -> None:
    """Draw a panel for encoding and one for decoding into a PNG (or svg, pdf)."""
    figure, panels = new_figure(2, width=13)
    for panel, axes, what in zip((2, 3), panels, ("encode", "decode"), strict=True):
        for point in points(result):
            ours = point[0].split(",")[0] in ("L3", "EP")
            axes.scatter(point[panel], point[1], s=40, color=COLOURS[0 if ours else 1])
            axes.annotate(
                point[0], (point[panel], point[1]), xytext=(5, 4), textcoords="offset points"
            )
        axes.set_xscale("log")
        axes.axvline(result["memcpy_gb_s"], color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel=f"{what} [GB/s of bfloat16, one core]; dotted: a plain copy")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="times smaller")
    save(figure, target, f"Coded records, {result['isa']}")
