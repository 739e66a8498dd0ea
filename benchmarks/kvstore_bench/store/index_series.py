"""How memory and times of `kvstore bench index` grow with the number of blocks, and a picture."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore_bench.chat.reports.plot import COLOURS, new_figure, save
from kvstore_bench.store.index import IndexPlan, Say

FIRST_BLOCKS = 100_000
SHARE = 10  # of fewer blocks the series begins with a tenth
STEPS = (1, 3)  # in each decade
FIELDS = ("bytes_per_block", "match_p50_us", "match_p99_ms", "put_p50_us", "pause_ms")
PANELS = {
    "bytes_per_block": "bytes a block",
    "match_p50_us": "match of 64, p50 [us]",
    "pause_ms": "longest pause [ms]",
}

Run = Callable[[IndexPlan, Say], dict[str, Any]]


def sizes(blocks: int) -> Iterator[int]:
    """Yield numbers of blocks that end with the given one."""
    decade = min(FIRST_BLOCKS, max(1, blocks // SHARE))
    while decade < blocks:
        yield from (step * decade for step in STEPS if step * decade < blocks)
        decade *= SHARE
    yield blocks


def series(run: Run, plan: IndexPlan, result: Mapping[str, Any], say: Say) -> list[dict[str, Any]]:
    """Return {"blocks", and FIELDS by policy} of each size, ascending.

    run: measures one size, in a process of its own: what others have given back would be taken
    again, and not be seen. result: of the largest.
    """
    found = []
    for blocks in sizes(plan.blocks):
        each = result if blocks == plan.blocks else _apart(run, replace(plan, blocks=blocks), say)
        found.append({"blocks": blocks, **{field: each[field] for field in FIELDS}})
    return found


def plot_index(found: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Draw a series into a PNG (or svg, pdf)."""
    figure, panels = new_figure(len(PANELS), width=13)
    blocks = [each["blocks"] for each in found]
    for axes, (field, title) in zip(panels, PANELS.items(), strict=True):
        for colour, policy in zip(COLOURS, found[0][field], strict=False):
            values = [each[field][policy] for each in found]
            axes.plot(blocks, values, marker="o", color=colour, label=policy)
        axes.set(xlabel="resident blocks", ylabel=title, xscale="log", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    save(figure, target, "Growth with the number of blocks")


def _apart(run: Run, plan: IndexPlan, say: Say) -> dict[str, Any]:
    say(f"for the series: {plan.blocks:,} blocks")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, (plan, _silent))


def _silent(text: str) -> None:
    pass
