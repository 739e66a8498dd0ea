"""What `kvstore replay` was asked for, and the replays that it makes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvstore.cli import replay_hosts, replay_table
from kvstore.plan import ModelKV
from kvstore.replay import Fleet, Result, Setup, Workload, all_of, replay
from kvstore.replay import replay_hosts as over_hosts
from kvstore.replay.bounds import Bounds
from kvstore.replay.routers import LOAD_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options that say what is replayed, and how: named as on the command line."""

    dram: str
    file_: str
    policy: str | None
    dram_policy: str | None
    file_policy: str | None
    compare: str | None
    admission: str
    write_budget: str
    reclaim: str
    hints: str | None
    format_: str | None
    lenient: bool
    block_tokens: int | None
    kv_bytes_per_token: str | None
    model: Path | None
    kv_dtype: str
    ratio: float
    file_ratio: float | None
    restart_at: float | None
    max_requests: int | None
    window_hours: float | None
    seed: int
    hosts: int | None
    router: str | None
    view_age: float | None
    load_bound: float | None
    mix: tuple[str, ...] = ()


class Replays:
    """Replays of one workload, each as a JSON object and as lines."""

    def __init__(
        self,
        workload: Workload,
        bounds: Bounds,
        asked: Asked,
        share: float,
        kv: ModelKV | None,
        *,
        mix: Mapping[str, float],
    ) -> None:
        self._workload = workload
        self._bounds = bounds
        self._asked = asked
        self._share = share
        self._mix = mix
        self._flops = kv.prefill_flops if kv is not None else None
        self._count = 0

    def one(self, setup: Setup, results: list[Result]) -> Iterator[tuple[dict[str, Any], str]]:
        """Replay over one host; what came of it is added to `results`. With a mix, before it
        without its costs."""
        unaware = None
        if self._mix:
            unaware = self._result(replace(setup, cost_aware=False))
            yield self._told(unaware)
        result = self._result(setup)
        results.append(result)
        row, text = self._told(result)
        if unaware is not None and unaware.saved_s and result.saved_s is not None:
            row["saved_s_vs_unaware"] = result.saved_s / unaware.saved_s
            text += f"\n{replay_table.gain_line(result, unaware)}"
        yield row, text

    def _told(self, result: Result) -> tuple[dict[str, Any], str]:
        text = "\n".join(replay_table.lines(result, with_head=self._is_first()))
        return replay_table.as_dict(self._workload, result), text

    def over_hosts(
        self, setup: Setup, routers: Sequence[str]
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Replay over one host with all the room, and then over many with each router."""
        asked = self._asked
        assert asked.hosts is not None
        one = self._result(all_of(setup, asked.hosts))
        for router in routers:
            fleet = Fleet(
                hosts=asked.hosts,
                router=router,
                view_age_s=asked.view_age,
                load_bound=asked.load_bound or LOAD_BOUND,
                seed=asked.seed,
            )
            with _replaying(len(self._workload.requests)) as done:
                result = over_hosts(
                    self._workload,
                    setup,
                    fleet,
                    one,
                    end_hints=self._share,
                    prefill_flops=self._flops,
                    progress=done,
                )
            text = "\n".join(replay_hosts.lines(result, with_head=self._is_first()))
            yield replay_hosts.as_dict(self._workload, result), text

    def _result(self, setup: Setup) -> Result:
        with _replaying(len(self._workload.requests)) as done:
            return replay(
                self._workload,
                setup,
                self._bounds,
                end_hints=self._share,
                restart_at=self._asked.restart_at,
                seed=self._asked.seed,
                prefill_flops=self._flops,
                mix=self._mix,
                progress=done,
            )

    def _is_first(self) -> bool:
        self._count += 1
        return self._count == 1


@contextmanager
def _replaying(requests: int) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr where somebody looks at it."""
    if not sys.stderr.isatty():
        yield lambda answered: None
        return
    with click.progressbar(length=requests, label="replaying", file=sys.stderr) as bar:
        yield lambda answered: bar.update(answered - bar.pos)
    click.echo("\033[A\r\033[K", nl=False, err=True)
