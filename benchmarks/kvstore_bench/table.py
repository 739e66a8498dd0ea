"""The report of a run as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

STATISTICS = ("mean", "p50", "p90", "p99", "std", "min", "max")
NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "latency"}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print what `Result.report` returned."""
    if report["completed"]:
        console.print(_latencies(report))
    console.print(_facts(report))
    for line in report["first_errors"]:
        console.print(f"  [red]{escape(line)}[/red]", highlight=False)
    for note in report["server"]["notes"]:
        console.print(f"  [yellow]not measured:[/yellow] {escape(note)}", highlight=False)


def _latencies(report: Mapping[str, Any]) -> RenderableType:
    title = f"Chat with {escape(report['model_id'])}, milliseconds"
    # Tight enough for a terminal of 80 columns.
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("")
    table.add_column("turns")
    for statistic in ("count", *STATISTICS):
        table.add_column(statistic, justify="right")
    parts = {"all": report, "first": report["first_turns"], "resumed": report["resumed_turns"]}
    for measure, name in NAMES.items():
        # A cache changes what is spent before the first token, so only that is told apart.
        apart = measure in ("ttft", "e2el")
        for turns, part in parts.items() if apart else [("all", report)]:
            values = [_number(part[f"{statistic}_{measure}_ms"]) for statistic in STATISTICS]
            shown = name if turns == "all" else ""
            table.add_row(shown, turns, f"{part['completed']:,}", *values)
    return table


def _facts(report: Mapping[str, Any]) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("requests", _requests(report))
    facts.add_row(
        "throughput",
        f"{report['request_throughput']:.2f} requests/s, {report['input_throughput']:,.0f} input"
        f" and {report['output_throughput']:,.0f} output tokens/s over {report['duration']:.1f} s",
    )
    facts.add_row(
        "tokens",
        f"{report['total_input_tokens']:,} input, {report['total_output_tokens']:,} output"
        + _note(report["without_usage"], "answers came without usage and are not counted"),
    )
    if report["total_cached_tokens"] is not None:
        cached = _share(report["total_cached_tokens"], report["total_input_tokens"])
        facts.add_row("cached (usage)", cached)
    for name, text in _server_facts(report["server"]):
        facts.add_row(name, text)
    return Group(facts)


def _requests(report: Mapping[str, Any]) -> str:
    text = f"{report['completed']:,} completed, {report['failed']:,} failed"
    if report["errors"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report["errors"].items()))
        text = f"{text} [red]({kinds})[/red]"
    text += f", {report['skipped']:,} turns skipped" if report["skipped"] else ""
    return text + _note(report["without_text"], "answers had no text, so no TTFT")


def _server_facts(server: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    titles = {
        "prompt_tokens_by_source": "prompt tokens from",
        "cached_tokens_by_source": "cached tokens from",
    }
    for key, title in titles.items():
        if server[key] is not None:
            total = sum(server[key].values())
            sources = [f"{name} {_share(n, total)}" for name, n in server[key].items() if n]
            facts.append((title, ", ".join(sources) or "none"))
    for kind in ("prefix_cache", "external_prefix_cache"):
        hits, queries = server[f"{kind}_hits"], server[f"{kind}_queries"]
        if hits is not None and queries:
            facts.append((kind.replace("_", " "), f"{_share(hits, queries)} of tokens asked for"))
    if server["preemptions"] is not None:
        facts.append(("preemptions", f"{server['preemptions']:,.0f}"))
    for name, value in (server["kvstore"] or {}).items():
        facts.append((escape(name), f"{value:,.0f}"))
    return facts


def _share(part: float, total: float) -> str:
    return f"{part:,.0f} ({100 * part / total:.1f} %)" if total else f"{part:,.0f}"


def _note(count: int, text: str) -> str:
    return f" [yellow]({count:,} {text})[/yellow]" if count else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
