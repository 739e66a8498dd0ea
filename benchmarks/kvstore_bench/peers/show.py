"""The result of `kvstore bench peers` as a person reads it: tables, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore_bench.chat.reports.plot import COLOURS, finish, new_figure, save
from kvstore_bench.peers.course import GETS, PUTS
from kvstore_bench.peers.roster import KEPT, OURS
from kvstore_bench.peers.turn import DEVICE_GETS

TITLES = {
    "put_accepted": "put, accepted",
    "put_durable": "put, durable",
    "hot_get": "hot get",
    "cold_get": "cold get",
    "restart_get": "get after kill",
}
LOST = "lost"


def print_peers(result: Mapping[str, Any]) -> None:
    """Print speeds, promises, ratios, and who did not take part."""
    console = Console()
    if result["systems"]:
        console.print(_speeds(result))
        console.print(_shares(result))
        console.print(_promises(result))
        if any("lower_get" in system["bytes_per_s"] for system in result["systems"].values()):
            console.print(_layers(result))
    if result["remote"]:
        console.print(_remote(result["remote"]))
    for measure in PUTS + GETS:
        if (ratio := result[f"{measure}_vs_best"]) is not None:
            best = result[f"{measure}_best"]
            console.print(f"{measure}_vs_best  {ratio:.3g}  (best peer: {best})")
    for name in ("lmcache_over_kvstore", "lmcache_over_s3", "lmcache_over_valkey"):
        for measure, ratio in (result[name] or {}).items():
            if ratio is not None:
                console.print(f"{name}.{measure}  {ratio:.3g}  (over its own files)")
    if (ratio := result["remote_get_vs_best"]) is not None:
        best = result["remote_get_best"]
        console.print(f"remote_get_vs_best  {ratio:.3g}  (best peer: {best})")
    for kind in ("skipped", "failed"):
        for name, line in result[kind].items():
            console.print(f"{name}: {kind}: {line}", highlight=False, soft_wrap=True)
    wrong = result["wrong"] + result["remote_wrong"]
    if wrong:
        console.print(f"{wrong} blocks came back with wrong bytes", style="bold red")


def _speeds(result: Mapping[str, Any]) -> Table:
    table = _table("GB/s: median ± half the range", ("", *TITLES.values(), "ready, s"))
    for name, system in result["systems"].items():
        ready = system["ready_s"]
        cells = [_speed(system, measure) for measure in TITLES]
        table.add_row(name, *cells, f"{ready['p50']:.2f}" if ready else "")
    return table


def _speed(system: Mapping[str, Any], measure: str) -> str:
    speed = system["bytes_per_s"].get(measure)
    if speed is not None:
        spread = (speed["max"] - speed["min"]) / 2 / speed["p50"]
        return f"{speed['p50'] / 1e9:.2f} ±{spread:.0%}"
    return LOST if measure == "restart_get" and system["kept"] is not None else "-"


def _shares(result: Mapping[str, Any]) -> Table:
    title = "Of what plain reads got just before and after: median, range"
    table = _table(title, ("", *(TITLES[measure] for measure in DEVICE_GETS)))
    for name, system in result["systems"].items():
        table.add_row(name, *(_share(system, measure) for measure in DEVICE_GETS))
    return table


def _share(system: Mapping[str, Any], measure: str) -> str:
    share = system["of_device"].get(measure)
    if share is None:
        return _speed(system, measure)
    return f"{share['p50']:.2f}  {share['min']:.2f} - {share['max']:.2f}"


def _layers(result: Mapping[str, Any]) -> Table:
    """What LMCache does over its own files, and over others."""
    titles = {"lower_put": "put, taken below", "lower_get": "get from below"}
    table = _table("Below LMCache, GB/s", ("", *titles.values(), TITLES["restart_get"]))
    for name, system in result["systems"].items():
        if "lower_get" in system["bytes_per_s"]:
            table.add_row(
                name,
                *(_speed(system, measure) for measure in titles),
                _speed(system, "restart_get"),
            )
    return table


def _remote(rows: Mapping[str, Any]) -> Table:
    title = "Gets from another process over TCP, GB/s: median ± half the range"
    table = _table(title, ("", "remote get", "missed", "wrong", "checks bytes"))
    for name, row in rows.items():
        speed = row.get("bytes_per_s")
        if speed is None:
            table.add_row(name, row["status"], "", "", row.get("install", ""))
            continue
        spread = (speed["max"] - speed["min"]) / 2 / speed["p50"]
        cell = f"{speed['p50'] / 1e9:.2f} ±{spread:.0%}"
        table.add_row(name, cell, str(row["missed"]), str(row["wrong"]), row["checks"])
    return table


def _promises(result: Mapping[str, Any]) -> Table:
    columns = ("", "kept", "missed", "wrong", "durable", "cold", "checks bytes")
    table = _table("What each promises", columns)
    for name, system in result["systems"].items():
        kept = "" if system["kept"] is None else f"{system['kept']:.0%}"
        texts = (system[key] or "never" for key in ("durable", "cold", "checks"))
        table.add_row(name, kept, str(system["missed"]), str(system["wrong"]), *texts)
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def plot_peers(result: Mapping[str, Any], target: Path) -> None:
    """Draw a panel a measure: medians as bars, ranges as lines."""
    figure, panels = new_figure(len(TITLES), width=3.6 * len(TITLES))
    names = list(result["systems"])[::-1]
    for panel, (measure, title) in zip(panels, TITLES.items(), strict=True):
        for place, name in enumerate(names):
            speed = result["systems"][name]["bytes_per_s"].get(measure)
            if speed is None:
                panel.text(0, place, f" {_speed(result['systems'][name], measure)}", va="center")
                continue
            p50, low, high = (speed[key] / 1e9 for key in ("p50", "min", "max"))
            panel.barh(place, p50, height=0.6, color=COLOURS[0 if name in (OURS, KEPT) else 5])
            panel.plot((low, high), (place, place), color="#333333", linewidth=1.5)
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set(title=title, xlabel="GB/s")
        finish(panel)
    plan = result["plan"]
    moved = f"{plan['blocks']} blocks of {plan['block_nbytes'] >> 20} MiB"
    save(figure, target, f"{moved}, {plan['rounds']} rounds: medians and ranges")
