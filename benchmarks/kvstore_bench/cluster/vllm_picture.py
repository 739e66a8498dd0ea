"""The picture of `kvstore bench cluster --vllm`: time to first token, by where the prompt was, and
by what the other host did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvstore_bench.chat.reports.plot import COLOURS, new_figure, save
from kvstore_bench.cluster.handoffs import MODES
from kvstore_bench.cluster.vllm_plan import FAULTS

WAYS = {
    "cold": "nobody has it: computed",
    "remote": "the other host has it",
    "local": "the own daemon has it",
}
Row = tuple[str, str, Sequence[float]]


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """Return a label, a colour and the seconds of each row, from top to bottom."""
    cold, ours, fails, handed = COLOURS[1], COLOURS[0], COLOURS[3], COLOURS[2]
    rows: list[Row] = [
        (label, cold if way == "cold" else ours, result["ttft_s"][way])
        for way, label in WAYS.items()
    ]
    for fault, case in result["faults"]["cases"].items():
        seconds = [each["ttft_s"] for each in case["asked"]]
        rows.append((f"the other host: {FAULTS[fault]}", fails, seconds))
    rows.append(("computed, in between", cold, result["faults"]["recompute_s"]))
    for mode in MODES:
        seconds = [
            each["handoff_s"]
            for each in result["handoffs"]
            if each["mode"] == mode and each["handoff_s"] is not None
        ]
        rows.append((f"from prefill there to token here, {mode}", handed, seconds))
    return [row for row in rows if row[2]]


def plot_engines(result: Mapping[str, Any], target: Path) -> None:
    """Draw a dot for each request and a bar for each median into a PNG (or svg, pdf)."""
    figure, axes = new_figure(1, width=10)
    rows = rows_of(result)
    for place, (_, colour, seconds) in enumerate(rows):
        middle = median(seconds)
        axes.barh(place, middle, height=0.6, color=colour, alpha=0.35)
        axes.scatter(seconds, [place] * len(seconds), s=18, color=colour, alpha=0.8, linewidths=0)
        axes.annotate(
            f"{middle:.2f} s",
            (max(seconds), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(max(seconds) for _, _, seconds in rows))
    axes.set(xlabel="time to first token [s]")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, target, f"A prompt of {result['plan']['prompt_tokens']:,} tokens on two hosts")
