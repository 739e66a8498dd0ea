"""A tier that is suddenly slow must not make anybody wait longer than recomputing would take.

Real vLLM, long prompts, one at a time. Prompts are saved; then the daemon is started again with one
tier slowed, and the prompts are asked again, each time from one tier: out of DRAM, off the disk, or
out of a bucket on a real S3 server. Beside it, an engine without connector computes them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.seaweed import Seaweed
from kvstore_bench.chat.metrics import server_counts
from kvstore_bench.console.exits import EXIT_FAILED_REQUESTS, explained
from kvstore_bench.demo import workload
from kvstore_bench.demo.asker import Alone
from kvstore_bench.demo.course import Plan
from kvstore_bench.demo.daemon import Daemon
from kvstore_bench.demo.engine import Engine, with_kvstore
from kvstore_bench.demo.machine import describe
from kvstore_bench.demo.model import kv_shape_of
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage

CASES = (
    ("dram", "file"),
    ("dram", "object"),
    ("file", "file"),
    ("file", "object"),
    ("object", "file"),
    ("object", "object"),
)
RATIO_MAX = 1.15
UPLOAD_TIMEOUT_S = 120.0
RECONNECT_S = 3.0
WARM_UP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt, asked of the engine with the connector. loaded: tokens that were not computed."""

    source: str
    slowed: str
    prompt: int
    ttft_s: float
    recompute_s: float
    loaded: float


class Course:
    """One run; `answered` is what it found."""

    def __init__(
        self, plan: Plan, stage: Stage, bucket: Seaweed, asked: workload.Workload, factor: float
    ) -> None:
        self.answered: list[Answered] = []
        self._plan = plan
        self._stage = stage
        self._bucket = bucket
        self._workload = asked
        self._factor = factor
        self._prompts = [list(each[0]) for each in asked.questions]
        self._alone = Alone()

    def run(self, progress: Progress) -> None:
        """Save the prompts, then ask for them in every case."""
        progress.say("starting the daemon and two engines")
        daemon = self._daemon("")
        spec = self._plan.spec("plain", self._workload, small=True)
        plain, cached = self._stage.engines([spec, with_kvstore(spec, "cached", daemon.target)])
        for engine in (plain, cached):
            self._ask(engine, self._warm_up)
        for prompt in progress.track("saving", self._prompts):
            self._ask(cached, prompt)
        self._settle(daemon)
        for source, slowed in CASES:
            progress.say(f"from {source}, {slowed} slowed {self._factor:g} times")
            daemon.child.stop()
            daemon = self._daemon(slowed, empty=source == "object")
            time.sleep(RECONNECT_S)
            self._ask(cached, self._warm_up)
            for number, prompt in enumerate(self._prompts):
                if source == "dram":
                    self._ask(cached, prompt)
                cached.forget_prefixes()
                before = cached.counters()
                ttft_s = self._ask(cached, prompt)
                sources = server_counts(before, cached.counters()).prompt_tokens_by_source or {}
                loaded = sources.get("external_kv_transfer", 0.0)
                plain.forget_prefixes()
                recompute_s = self._ask(plain, prompt)
                self.answered.append(Answered(source, slowed, number, ttft_s, recompute_s, loaded))

    @property
    def _warm_up(self) -> list[int]:
        return list(self._workload.fresh[0][:WARM_UP_TOKENS])

    def _ask(self, engine: Engine, prompt: Sequence[int]) -> float:
        """Return the TTFT, in seconds, when no other engine spins any more."""
        return self._alone.ask(engine, prompt, 1).ttft_s

    def _daemon(self, slowed: str, *, empty: bool = False) -> Daemon:
        """Start a daemon. empty: on a new disk, so that only the bucket holds anything."""
        if empty:
            shutil.rmtree(self._stage.store)
        settings = {f"object.{k}": _text(v) for k, v in self._bucket.settings().items()}
        program = (
            sys.executable,
            "-m",
            "kvstore_bench.tiers.slow_daemon",
            slowed,
            f"{self._factor:g}",
        )
        return self._stage.daemon(
            dram_nbytes=self._plan.dram_nbytes(self._workload),
            program=program if slowed else None,
            settings=settings,
            environ={**os.environ, **self._bucket.environment},
        )

    def _settle(self, daemon: Daemon) -> None:
        """Wait until everything is on disk and in the bucket. Raises Unavailable."""
        daemon.flush()
        deadline = time.monotonic() + UPLOAD_TIMEOUT_S
        with Client(daemon.target) as client:
            while client.admin.stats()["object"]["uploads_waiting"]:
                if time.monotonic() > deadline:
                    raise Unavailable(f"not uploaded within {UPLOAD_TIMEOUT_S:.0f} s")
                time.sleep(0.2)


def cases(answered: Sequence[Answered]) -> list[dict[str, Any]]:
    """Return each case with its medians over the prompts. ratio: TTFT over recompute."""
    # A prompt takes as long to compute in every case.
    recompute_s = {
        number: statistics.median(each.recompute_s for each in answered if each.prompt == number)
        for number in {each.prompt for each in answered}
    }
    found = []
    for source, slowed in CASES:
        some = [each for each in answered if (each.source, each.slowed) == (source, slowed)]
        ratios = [each.ttft_s / recompute_s[each.prompt] for each in some]
        found.append(
            {
                "source": source,
                "slowed": slowed,
                "ratio": statistics.median(ratios),
                "ratio_max": max(ratios),
                "ttft_s": statistics.median(each.ttft_s for each in some),
                "recompute_s": statistics.median(recompute_s.values()),
                "loaded_tokens": statistics.median(each.loaded for each in some),
            }
        )
    return found


def not_loaded(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cases in which nothing was loaded although another tier was the slow one: without
    a load, a TTFT says nothing about loads. Out of the slow tier itself, computing may be right."""
    return [
        f"out of {row['source']} while {row['slowed']} was slow"
        for row in rows
        if row["source"] != row["slowed"] and not row["loaded_tokens"]
    ]


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of a checkpoint with a tokenizer.json.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/slowed"),
    show_default=True,
)
@click.option("--factor", type=click.FloatRange(1), default=50.0, show_default=True)
@click.option("--tokens", type=click.IntRange(256), default=4000, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result file instead of a table.")
def main(
    *, model: Path, out: Path, factor: float, tokens: int, prompts: int, as_json: bool
) -> None:
    """Ask real vLLM for stored prompts while one tier is slow. Writes result.json and logs.

    Example: python -m kvstore_bench.tiers.slowed --model build/models/gemma-3-270m --factor 50
    """
    with explained():
        plan = _plan(model)
        shape = workload.Shape(
            conversations=prompts,
            turns=1,
            fresh=1,
            first_tokens_min=tokens,
            first_tokens_max=tokens,
        )
        asked = workload.build(shape, *workload.tokenizer_of(model))
        out = out.resolve()
        with Seaweed().start() as bucket, Stage(out) as stage:
            course = Course(plan, stage, bucket, asked, factor)
            course.run(Progress(Console(stderr=True)))
    rows = cases(course.answered)
    worst, missing = max(row["ratio"] for row in rows), not_loaded(rows)
    result = {
        "passed": worst <= RATIO_MAX and not missing,
        "ratio_worst": worst,
        "not_loaded": missing,
        "factor": factor,
        "tokens": tokens,
        "cases": rows,
        "answered": [asdict(each) for each in course.answered],
        "model": plan.model.name,
        "dtype": plan.dtype,
        "machine": asdict(plan.machine),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(rows, factor)
    if missing:
        why = f"the logs in {out / 'logs'} say why"
        click.echo(f"no stored token was loaded {', nor '.join(missing)}: {why}", err=True)
    sys.exit(0 if result["passed"] else EXIT_FAILED_REQUESTS)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plan(model: Path) -> Plan:
    machine = describe()
    return Plan(
        model=model.resolve(),
        kv=kv_shape_of(model),
        machine=machine,
        dtype=machine.dtype,
        threads=machine.threads,
        phases=frozenset(),
    )


def _print(rows: Sequence[dict[str, Any]], factor: float) -> None:
    table = Table(title=f"one tier slowed {factor:g} times: TTFT over recomputing")
    for name in ("out of", "slowed", "TTFT", "recompute", "tokens loaded", "ratio"):
        table.add_column(name, justify="left" if name in ("out of", "slowed") else "right")
    for row in rows:
        table.add_row(
            row["source"],
            row["slowed"],
            f"{row['ttft_s']:.2f} s",
            f"{row['recompute_s']:.2f} s",
            f"{row['loaded_tokens']:.0f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
