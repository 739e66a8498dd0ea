"""`kvstore top --history`: what a daemon held and did, drawn in the terminal."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import click

from kvstore.client import Client
from kvstore.model.words import duration, percent, rounded, size
from kvstore.rpc.v1 import kvstore_pb2 as pb

SPANS = {"5min": (1, 300.0), "1h": (10, 3600.0), "24h": (300, 86400.0)}
_TIERS = ("dram", "file", "object", "peer", "pool")
_BARS = "▁▂▃▄▅▆▇█"
_NAME_CHARS, _TEXT_CHARS = 16, 30
WIDTH_MIN = 20


class Line(NamedTuple):
    """One plot. values: over time, None where nothing is known. top: of the scale; None: the
    largest value. say: writes a value."""

    name: str
    values: list[float | None]
    top: float | None
    say: Callable[[float], str]


def show_history(client: Client, span: str, target: str, *, as_json: bool) -> None:
    """Print what there is of the last `span`: plots, or a line of JSON for each sample."""
    step_s, span_s = SPANS[span]
    reply = client.admin.history(step_s, since=time.time() - span_s)
    if as_json:
        for sample in reply.samples:
            told = dict(zip(reply.columns, sample.values, strict=True))
            click.echo(json.dumps({"time": sample.at, "seconds": sample.seconds, **told}))
        return
    if not reply.samples:
        click.echo("there is no sample yet: the daemon has just started")
        return
    width = max(WIDTH_MIN, shutil.get_terminal_size().columns - _NAME_CHARS - _TEXT_CHARS - 2)
    now = time.time()
    click.echo(f"kvstore at {target}, the last {span}; newest on the right, `.`: no sample")
    for line in _lines(reply, now - span_s, now, width):
        click.echo(_drawn(line))


def _lines(reply: pb.HistoryReply, begin: float, end: float, width: int) -> Iterator[Line]:
    """Yield the plots, without those of tiers that there are not, and of what never happened."""
    cells = _cells(reply.samples, begin, end, width)
    at = {name: place for place, name in enumerate(reply.columns)}

    def last(name: str) -> list[float | None]:
        return [cell[-1].values[at[name]] if cell else None for cell in cells]

    def most(name: str) -> list[float | None]:
        return [max(each.values[at[name]] for each in cell) if cell else None for cell in cells]

    def total(cell: Sequence[pb.Sample], *names: str) -> float:
        return sum(each.values[at[name]] for each in cell for name in names)

    def rate(*names: str) -> list[float | None]:
        return [
            total(cell, *names) / sum(each.seconds for each in cell) if cell else None
            for cell in cells
        ]

    def share(parts: Sequence[str], whole: str) -> list[float | None]:
        return [
            total(cell, *parts) / of if cell and (of := total(cell, whole)) else None
            for cell in cells
        ]

    for tier in ("dram", "file", "object"):
        capacity = max((value or 0.0 for value in last(f"{tier}.capacity_bytes")), default=0.0)
        if capacity:
            yield Line(f"{tier} used", last(f"{tier}.used_bytes"), capacity, size)
    hits = [f"hit_blocks.{tier}" for tier in _TIERS]
    yield Line("hit ratio", share(hits, "lookup_blocks"), 1.0, lambda v: percent(v, 1))
    for tier, name in zip(_TIERS, hits, strict=True):
        of_tier = share([name], "lookup_blocks")
        if any(of_tier):
            yield Line(f"  {tier}", of_tier, 1.0, lambda v: percent(v, 1))
    yield Line("requests", rate("requests"), None, _per_s)
    yield from _that_happened(
        Line(f"  {name.removeprefix('ended.')[: _NAME_CHARS - 3]}", rate(name), None, _per_s)
        for name in reply.columns
        if name.startswith("ended.")
    )
    yield from _that_happened(
        [
            Line("prefill saved", rate("saved_prefill_s"), None, lambda v: f"{duration(v)}/s"),
            *(
                Line(f"{tier} {direction}", rate(f"{direction}.{tier}"), None, _bandwidth)
                for tier in _TIERS
                for direction in ("read", "written")
            ),
            *(
                Line(f"{name.removeprefix('queue.')} queue", most(name), None, rounded)
                for name in reply.columns
                if name.startswith("queue.")
            ),
            Line("durable lag", most("durable_lag_s"), None, duration),
        ]
    )


def _per_s(value: float) -> str:
    return f"{rounded(value)}/s"


def _bandwidth(value: float) -> str:
    return f"{size(value)}/s"


def _that_happened(lines: Sequence[Line] | Iterator[Line]) -> Iterator[Line]:
    return (line for line in lines if any(line.values))


def _cells(
    samples: Sequence[pb.Sample], begin: float, end: float, width: int
) -> list[list[pb.Sample]]:
    """Return the samples of each of `width` spans. A sample that is longer than a span is in all
    that it covers."""
    cells: list[list[pb.Sample]] = [[] for _ in range(width)]
    wide = (end - begin) / width
    for sample in samples:
        last = min(width - 1, int((sample.at - begin) / wide))
        first = max(0, int((sample.at - sample.seconds - begin) / wide + 0.5))
        for place in range(min(first, last), last + 1):
            cells[place].append(sample)
    return cells


def _drawn(line: Line) -> str:
    known = [value for value in line.values if value is not None]
    top = line.top or max(known, default=0.0)
    bars = "".join("." if value is None else _bar(value, top) for value in line.values)
    text = "nothing asked"
    if known:
        text = f"{line.say(known[-1])}, at most {line.say(max(known))}"
    return f"{line.name:<{_NAME_CHARS}}{bars}  {text}"


def _bar(value: float, top: float) -> str:
    if value <= 0 or top <= 0:
        return " "
    return _BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))]
