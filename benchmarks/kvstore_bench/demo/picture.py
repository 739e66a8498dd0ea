"""The plot of a run: every resumed turn's TTFT, by phase, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from kvstore_bench.demo.book import Book

COLOURS = {"none": "#D55E00", "device": "#999999"}
OURS = "#0072B2"
OTHER = "#009E73"
FORM_NAMES = {"raw": "raw records", "l3": "L3 records", "ep": "EP records"}


def rows_of(book: Book) -> list[tuple[str, str, list[float]]]:
    """Return (label, colour, TTFTs in seconds) of each phase that ran, top to bottom."""
    device = [
        value
        for phase in ("dram", "replica", "restart")
        for value in book.ttfts(f"device_{phase}").values()
    ]
    rows = [
        ("no connector", COLOURS["none"], list(book.ttfts("none").values())),
        ("conversations growing", OURS, list(book.ttfts("cold").values())),
        ("warm from DRAM", OURS, list(book.ttfts("dram").values())),
        ("second engine", OURS, list(book.ttfts("replica").values())),
        ("all killed, restarted:\nwarm from disk", OURS, list(book.ttfts("restart").values())),
        ("vLLM's own offloading", OTHER, list(book.ttfts("native").values())),
        ("engine's own device hit", COLOURS["device"], device),
        *(
            (f"DRAM too small, {name}", OURS, list(book.ttfts(f"capacity_{form}").values()))
            for form, name in FORM_NAMES.items()
        ),
    ]
    return [row for row in rows if row[2]]


def plot(book: Book, target: Path, *, title: str) -> None:
    """Draw the plot into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    rows = rows_of(book)
    figure = Figure(figsize=(9, 0.9 + 0.55 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (_, colour, values) in enumerate(reversed(rows)):
        jitter = [place + 0.28 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
        axes.scatter(values, jitter, s=16, alpha=0.4, color=colour, linewidths=0)
        middle = median(values)
        axes.plot([middle, middle], [place - 0.3, place + 0.3], color=colour, linewidth=2.5)
        axes.annotate(
            f"{middle:.2f} s",
            (middle, place + 0.3),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )
    axes.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)])
    axes.set_ylim(-0.5, len(rows) - 0.3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axes.set_xlabel("time to first token of resumed turns [s, logarithmic]; bars are medians")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(target, dpi=150)
