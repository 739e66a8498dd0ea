"""The picture of `kvstore bench fidelity`: how small against how different."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore_bench.chat.reports.plot import COLOURS, new_figure, save

OURS = {
    "l3": "L3, exact",
    "ep88": "EP, all parts",
    "ep65": "EP K6V5",
    "ep54": "EP, base",
    "ep43": "EP K4V3",
}
RIVALS = {
    "fp8": "fp8",
    "fp8_first_exact": "fp8, first block exact",
    "int8_token": "int8 a token",
    "nvfp4": "NVFP4",
    "turboquant4": "TurboQuant-4",
}

_LABELS = {"fp8": (6, 9, "left"), "int8 a token": (-8, -4, "right")}
_LABELS["fp8, first block exact"] = (6, -11, "left")


def rows(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each rung's title and figures."""
    for name, title in (OURS | RIVALS).items():
        yield title, result[name]


def plot_fidelity(result: Mapping[str, Any], target: Path) -> None:
    """Draw KL over size into a PNG (or svg, pdf). What loses nothing is not drawn."""
    figure, axes = new_figure(1, width=8)
    for title, each in rows(result):
        if each["kl"] <= 0:
            continue
        axes.scatter(each["ratio"], each["kl"], s=40, color=COLOURS[title in RIVALS.values()])
        right, up, side = _LABELS.get(title, (6, 4, "left"))
        axes.annotate(
            title,
            (each["ratio"], each["kl"]),
            xytext=(right, up),
            textcoords="offset points",
            ha=side,
        )
    axes.set_yscale("log")
    axes.set(xlabel="times smaller than bfloat16", ylabel="KL from exact KV [nats a token]")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, target, f"What stored KV changes: {result['model']}")
