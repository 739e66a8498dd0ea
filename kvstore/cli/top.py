"""`kvstore top`: what a daemon does now, interval by interval."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.history import SPANS, show_history
from kvstore.cli.kind import check_finite
from kvstore.cli.target import connect, daemon_options
from kvstore.client import Client
from kvstore.model.errors import Unavailable
from kvstore.model.words import (
    bar,
    duration,
    fidelity_lines,
    percent,
    printable,
    share_lines,
    size,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

TIERS = ("dram", "file", "object", "peer", "pool")
_CALLS = ("Match", "Acquire", "Reserve", "Commit", "Release", "Put", "Get")


@click.command()
@daemon_options
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds that each line or screen covers.",
)
@click.option("--once", is_flag=True, help="Show one interval and end.")
@click.option(
    "--history",
    type=click.Choice(list(SPANS)),
    is_flag=False,
    flag_value="5min",
    metavar="[5min|1h|24h]",
    help="Draw what the daemon remembers instead, and end; 5min unless told.",
)
def top(target: str, as_json: bool, interval_s: float, once: bool, history: str | None) -> None:
    """Show tiers, hits, fidelity, bandwidth, queues and sessions, live; Ctrl-C ends it.

    Where the output is no terminal, one screen follows the other. With --json, it prints one line
    per interval, or per sample of the history. The live view needs the extra kvstore-tiers[cli].

    \b
    Examples:
      kvstore top
      kvstore top --once
      kvstore top --json --interval 10 | jq -c .hits
      kvstore top --history 1h
    """
    check_finite({"interval": interval_s})
    with connect(target) as client:
        if history is not None:
            show_history(client, history, target, as_json=as_json)
            return
        client.connect()
        frames = _frames(client, interval_s, once=once)
        if not as_json:
            _show(frames, target, once=once)
            return
        with nullcontext() if once else suppress(KeyboardInterrupt):
            for frame in frames:
                click.echo(json.dumps(frame))


def _frames(client: Client, interval_s: float, *, once: bool) -> Iterator[dict[str, Any]]:
    """Yield what happened in each interval. While the daemon is away, {"error": ...}."""
    before, at = client.admin.stats(), time.monotonic()
    while True:
        time.sleep(interval_s)
        try:
            after, now = client.admin.stats(), time.monotonic()
        except Unavailable as error:
            if once:
                raise
            yield {"time": time.time(), "error": str(error)}
            continue
        if after["instance"] == before["instance"]:
            yield summary(before, after, now - at)
            if once:
                return
        before, at = after, now


def summary(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return what happened between two stats of one life of a daemon, as rates a second."""

    def rate(*path: str) -> float:
        return (_at(after["totals"], path) - _at(before["totals"], path)) / seconds

    def thinned(stats: dict[str, Any]) -> float:
        return float(stats["dram"].get("thinned_records", 0))

    lookups = rate("lookup_blocks")
    hits = {tier: rate("hit_blocks", tier) for tier in TIERS}
    calls = {}
    for method in _CALLS:
        count = rate("rpc_seconds", method, "count")
        if count:
            calls[method] = {
                "per_s": count,
                "mean_s": rate("rpc_seconds", method, "sum") / count,
            }
    return {
        "time": time.time(),
        "interval_s": seconds,
        "dram": after["dram"],
        "file": after["file"],
        "hits": {
            "lookup_blocks_per_s": lookups,
            "ratio": sum(hits.values()) / lookups if lookups else None,
            **{f"{tier}_ratio": hits[tier] / lookups if lookups else None for tier in hits},
        },
        "fidelities": after.get("fidelities", []),
        "fine_parts": {
            "thinned_per_s": (thinned(after) - thinned(before)) / seconds,
            "base_hits_per_s": rate("base_hit_blocks"),
        },
        "ended_by": _changed(before["totals"], after["totals"], "requests"),
        "refused": _changed(before["totals"], after["totals"], "refused_parts"),
        "bytes_per_s": {
            f"{tier}_{direction}": rate("tier_bytes", f"{tier}/{direction}")
            for tier in TIERS
            for direction in ("read", "write")
        },
        "queues": after["queues"],
        "durable_lag_s": after["durable_lag_s"],
        "dirty_bytes": after["dirty_bytes"],
        "calls": calls,
        "sessions": after["sessions"],
        "leases": after["leases"],
        "clients": after["clients"],
        "tenants": {
            name: {"share": stats["share"]} for name, stats in after.get("tenants", {}).items()
        },
    }


def _at(totals: dict[str, Any], path: tuple[str, ...]) -> float:
    found: Any = totals
    for name in path:
        found = found.get(name, 0) if isinstance(found, dict) else 0
    return float(found) if not isinstance(found, dict) else 0.0


def _changed(before: dict[str, Any], after: dict[str, Any], name: str) -> dict[str, float]:
    """Return how much each item of a labelled counter grew, those that did."""
    grown = {
        label: count - _at(before, (name, label)) for label, count in after.get(name, {}).items()
    }
    return {label: count for label, count in grown.items() if count}


def _show(frames: Iterator[dict[str, Any]], target: str, *, once: bool) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise click.ClickException(
            "the live view needs rich: pip install 'kvstore-tiers[cli]', or use --json"
        ) from error
    console = Console()
    if once:
        console.print(_view(next(frames), target))
        return
    with suppress(KeyboardInterrupt):  # the usual way out
        if not console.is_terminal:
            for frame in frames:
                console.print(_view(frame, target))  # and flushes it
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for frame in frames:
                live.update(_view(frame, target), refresh=True)


def _view(frame: dict[str, Any], target: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    title = Text(f"kvstore at {target}", "table.title")
    table = Table(box=None, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if "error" in frame:
        table.add_row("away", Text(frame["error"]))
        return table
    for name, text in _rows(frame):
        table.add_row(name, Text(text))  # names are no markup
    return table


def _rows(frame: dict[str, Any]) -> Iterator[tuple[str, str]]:
    dram, file, hits, rates = frame["dram"], frame["file"], frame["hits"], frame["bytes_per_s"]
    for name, tier, used in (("dram", dram, "used_bytes"), ("file", file, "physical_bytes")):
        if tier["capacity_bytes"]:
            yield (
                name,
                f"{bar(tier[used], tier['capacity_bytes'])} {size(tier[used])} of "
                f"{size(tier['capacity_bytes'])}, {tier['blocks']} blocks; "
                f"read {size(rates[f'{name}_read'])}/s, write {size(rates[f'{name}_write'])}/s",
            )
    yield (
        "hits",
        f"{_ratio(hits['ratio'])} of {hits['lookup_blocks_per_s']:.0f} blocks/s: "
        + ", ".join(
            f"{_ratio(hits[f'{tier}_ratio'])} {tier}"
            for tier in TIERS
            if tier in ("dram", "file") or hits[f"{tier}_ratio"]
        ),
    )
    yield from _fidelity_rows(frame)
    yield "ended by", _counts(frame["ended_by"])
    yield "refused", _counts(frame["refused"])
    yield "queues", _counts(frame["queues"])
    yield (
        "durable",
        f"lag {duration(frame['durable_lag_s'])}, {size(frame['dirty_bytes'])} to write",
    )
    yield (
        "leases",
        f"{frame['leases']}; {size(dram['leased_bytes'])} of at most "
        f"{size(dram['leased_bytes_max'])} leased, {size(dram['limbo_bytes'])} in limbo",
    )
    for at, line in enumerate(share_lines(frame["tenants"])):
        yield ("" if at else "tenants"), line
    for method, call in frame["calls"].items():
        yield method, f"{call['per_s']:.0f}/s, {duration(call['mean_s'])}"
    yield "sessions", str(frame["sessions"])
    for client in frame["clients"]:
        yield "", f"{printable(client['name']) or 'unnamed'}: {client['leases']} leases"


def _fidelity_rows(frame: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for at, line in enumerate(fidelity_lines(frame)):
        yield ("" if at else "kept"), line
    rates = frame["fine_parts"]
    if any(rates.values()) or any(each["fidelity"] != "exact" for each in frame["fidelities"]):
        yield (
            "fine parts",
            f"{rates['thinned_per_s']:.0f}/s dropped from dram for room, "
            f"{rates['base_hits_per_s']:.0f} blocks/s served without theirs",
        )


def _ratio(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)


def _counts(counts: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in counts.items()) or "-"
