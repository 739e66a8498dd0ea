"""`kvstore replay --mix`: several models, from one trace or from several."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path

import click

from kvstore.cli.replay_asked import Asked
from kvstore.replay import Workload
from kvstore.replay.models import check_mix, merged, named


def mixed(
    trace: Path, asked: Asked, read: Callable[[Path], Workload]
) -> tuple[Workload, dict[str, float]]:
    """Return what is replayed, and the seconds of prefill of 1,000 tokens by model.

    Raises UsageError for words that are no MODEL=SECONDS or TRACE=SECONDS, and for many hosts.
    """
    if asked.mix and asked.hosts is not None:
        raise click.UsageError("--mix is of one host: leave out --hosts")
    workload = read(trace)
    if not asked.mix:
        return workload, {}
    costs: dict[str, float] = {}
    others: list[Workload] = []
    for word in asked.mix:
        name, found, number = word.rpartition("=")
        seconds = _seconds(number)
        if not found or not name or seconds is None:
            raise click.UsageError(f"--mix {word}: write MODEL=SECONDS or TRACE=SECONDS")
        path = Path(name)
        if path.is_file():
            name = path.name
            if path.resolve() != trace.resolve():
                others.append(named(read(path), name))
        if name in costs:
            raise click.UsageError(f"--mix {word}: {name} has a cost already")
        costs[name] = seconds
    workload = named(workload, trace.name)
    if others:
        workload = merged([workload, *others])
    check_mix(workload, costs)
    return workload, costs


def _seconds(number: str) -> float | None:
    try:
        seconds = float(number)
    except ValueError:
        return None
    return seconds if isfinite(seconds) and seconds > 0 else None
