"""The result as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore_bench.demo.verdict import Check

TITLES = {
    "none": "no connector",
    "cold": "kvstore, conversations growing",
    "dram": "kvstore, warm from DRAM",
    "replica": "kvstore, second engine",
    "restart": "kvstore, all killed, from disk",
    "native": "vLLM's own offloading, warm from DRAM",
    "device_dram": "engine's own device hit",
    "raw_dram": "raw records, from DRAM",
    "l3_dram": "L3 records, from DRAM",
    "ep_dram": "EP records, from DRAM",
    "raw_restart": "raw records, from disk",
    "l3_restart": "L3 records, from disk",
    "ep_restart": "EP records, from disk",
    "capacity_raw": "raw records, DRAM too small",
    "capacity_l3": "L3 records, DRAM too small",
    "capacity_ep": "EP records, DRAM too small",
}


def print_result(result: Mapping[str, Any], found: Sequence[Check], to: Console) -> None:
    """Print TTFT by phase, then every check."""
    to.print(_ttfts(result))
    to.print(checks_table(found))
    for leak in result["leaks_found"]:
        to.print(f"[red]left behind:[/red] {leak}", highlight=False)
    verdict = "[green]passed[/green]" if result["passed"] else "[red]failed[/red]"
    to.print(f"{verdict} after {result['duration_s']:.0f} s", highlight=False)


def _ttfts(result: Mapping[str, Any]) -> Table:
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['cores']} cores of {machine['cpu']}"
    title = f"TTFT of resumed turns, {result['model']} in {result['dtype']} on {where}"
    table = Table(title=title, title_justify="left")
    table.add_column("phase")
    headings = ("median [s]", "p25", "p75", "of no connector", "from the cache")
    for heading in headings:
        table.add_column(heading, justify="right")
    phases = result["phases"]
    for phase, name in TITLES.items():
        seen = phases.get(phase, {}).get("resumed_ttft_s")
        if seen:
            ratio = seen["median"] / phases["none"]["resumed_ttft_s"]["median"]
            times = (f"{seen[key]:.3f}" for key in ("median", "p25", "p75"))
            table.add_row(name, *times, f"{ratio:.3f}", _cached(phases[phase]["counts"]))
    return table


def _cached(counts: Mapping[str, Any] | None) -> str:
    by_source = (counts or {}).get("prompt_tokens_by_source")
    if not by_source:
        return "-"
    total = sum(by_source.values())
    return f"{100 * (total - by_source.get('local_compute', 0)) / total:.0f} %"


def checks_table(found: Sequence[Check]) -> Table:
    table = Table(title="What must come out", title_justify="left")
    promises = any(check.promised is not None for check in found)
    for heading in ("field", "measured", "limit", *(("promised",) if promises else ()), ""):
        table.add_column(heading, justify="left" if heading in ("field", "") else "right")
    for check in found:
        sign = ">=" if check.at_least else "<="
        promised = "" if check.promised is None else f"{sign} {check.promised:g}"
        table.add_row(
            check.field,
            f"{check.value:.3g}",
            f"{sign} {check.limit:g}",
            *((promised,) if promises else ()),
            _mark(check),
        )
    return table


def _mark(check: Check) -> str:
    if not check.passed:
        return "[red]FAILED[/red]"
    return "[yellow]missed[/yellow]" if check.missed else "[green]ok[/green]"
