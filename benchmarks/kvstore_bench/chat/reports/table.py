"""The report of a run as a person reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

POINT_COLUMNS = (
    ("completed", "requests"), ("failed", "failed"), ("p50_ttft_ms", "TTFT p50"),
    ("p99_ttft_ms", "p99"), ("p50_itl_ms", "ITL p50"), ("p99_itl_ms", "p99"),
    ("mean_tpot_ms", "TPOT mean"), ("p50_e2el_ms", "latency p50"),
    ("request_throughput", "requests/s"), ("output_throughput", "output tok/s"),
    ("request_goodput", "goodput/s"),
)  # fmt: skip
INTERRUPTED = "interrupted: this is what was measured until then"
# Above this, pieces of text and tokens are not the same thing any more.
TOKENS_PER_CHUNK_NOTED = 1.05
STATISTICS = ("mean", "p50", "p90", "p99", "std", "min", "max")
NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "latency"}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print what `Result.report` returned."""
    if report["completed"]:
        console.print(_latencies(report))
    console.print(_facts(report))
    if report["interrupted"]:
        console.print(f"  [yellow]{INTERRUPTED}[/yellow]")
    for line in report["first_errors"]:
        console.print(f"  [red]{escape(line)}[/red]", highlight=False)
    for note in report["server"]["notes"]:
        console.print(f"  [yellow]not measured:[/yellow] {escape(note)}", highlight=False)


def print_points(document: Mapping[str, Any], console: Console) -> None:
    """Print a line a run of a sweep or a grid."""
    points = document["points"]
    title = f"Chat with {escape(points[0]['model_id'])}, milliseconds"
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for _, name in POINT_COLUMNS:
        table.add_column(name, justify="right")
    for point in points:
        values = [_number(point[key]) for key, _ in POINT_COLUMNS[2:]]
        counts = [f"{point[key]:,}" for key, _ in POINT_COLUMNS[:2]]
        table.add_row(escape(point["name"]), *counts, *values)
    console.print(table)
    for point in points:
        for line in point["first_errors"]:
            console.print(f"  [red]{escape(point['name'])}: {escape(line)}[/red]", highlight=False)
        if point["interrupted"]:
            console.print(f"  [yellow]{escape(point['name'])}: {INTERRUPTED}[/yellow]")


def print_comparison(document: Mapping[str, Any], console: Console) -> None:
    """Print what `compare.compare` returned: a table a run."""
    confidence = f"{100 * document['confidence']:g} %"
    for point in document["points"]:
        title = escape(f"{point['name']}  A: {document['a']}, B: {document['b']}".strip())
        table = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        table.add_column("")
        headings = ("A", "B", "B - A", f"{confidence} interval", "B / A", f"{confidence} interval")
        for heading in headings:
            table.add_column(heading, justify="right")
        table.add_column("")
        for metric in point["metrics"]:
            table.add_row(metric["metric"], *_comparison(metric))
        console.print(table)
        counts = " and ".join(f"{count:,}" for count in point["requests"])
        kind = (
            "the same conversations, resampled together" if point["paired"] else "resampled apart"
        )
        console.print(f"  {counts} requests; {kind}", highlight=False)
        for line in point["differences"]:
            console.print(f"  [yellow]differs:[/yellow] {escape(line)}", highlight=False)


def _comparison(metric: Mapping[str, Any]) -> list[str]:
    interval = metric["ratio_ci"]
    verdict = "" if interval is None else "no difference shown"
    if interval is not None and not interval[0] <= 1 <= interval[1]:
        verdict = "B is lower" if interval[1] < 1 else "B is higher"
    return [
        *(_number(metric[key]) for key in ("a", "b", "difference")),
        _range(metric["difference_ci"], _number),
        "-" if metric["ratio"] is None else f"{metric['ratio']:.3f}",
        _range(interval, lambda value: f"{value:.3f}"),
        verdict,
    ]


def _range(ends: Sequence[float] | None, shown: Callable[[float], str]) -> str:
    return "-" if ends is None else f"{shown(ends[0])} to {shown(ends[1])}"


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
    if report["request_goodput"] is not None:
        good = 100 * (report["slo_attainment"] or 0.0)
        facts.add_row("goodput", f"{report['request_goodput']:.2f} requests/s, {good:.1f} % good")
    tokens_per_chunk = report["tokens_per_chunk"]
    if tokens_per_chunk is not None and tokens_per_chunk > TOKENS_PER_CHUNK_NOTED:
        text = f"{tokens_per_chunk:.2f}: ITL is the time between chunks, TPOT that of a token"
        facts.add_row("tokens per chunk", text)
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
    if report["warmup_requests"]:
        text += f", {report['warmup_requests']:,} of the warm-up left out"
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
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}"
