"""`python -m kvstore_bench.waterfall`: run, print, write the JSON and the picture."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvstore.model.errors import KVStoreError
from kvstore_bench.demo.daemon import Daemon
from kvstore_bench.demo.engine import Engine, EngineSpec, with_kvstore
from kvstore_bench.demo.machine import describe
from kvstore_bench.demo.model import kv_shape_of
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage
from kvstore_bench.waterfall.picture import plot
from kvstore_bench.waterfall.stages import STAGES, medians, read_marks, stages_of
from kvstore_bench.waterfall.timed import MARKS_FILE

EXIT_IMPOSSIBLE = 2
FOLDER = click.Path(file_okay=False, path_type=Path)
TOKENS_RANGE = (1000, 30_000)
ROOM = 6  # the daemon's arena, of what is stored
SETTLE_S = 3.0
SPIN_S = 1.1
SOURCES = ("device", "dram", "file")


@dataclass(slots=True)
class Course:
    """Asks one engine for the same prompts, from every source, one at a time."""

    stage: Stage
    spec: EngineSpec
    prompts: Sequence[Sequence[int]]
    dram_nbytes: int
    marks: Path
    progress: Progress
    requests: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    ttfts_ms: dict[str, list[float]] = field(default_factory=dict)

    def run(self, passes: int) -> None:
        """Store the prompts, then resume from DRAM and from files, beside the engine's own hits."""
        self.progress.say("starting the daemon and the engine")
        daemon = self._daemon()
        os.environ[MARKS_FILE] = str(self.marks)
        try:
            (engine,) = self.stage.engines([_timed(self.spec, daemon.target)])
        finally:
            del os.environ[MARKS_FILE]
        for prompt in self.progress.track("stored", self.prompts):
            engine.ask(prompt, 1)
        daemon.flush()
        for number in range(passes):
            for prompt in self.progress.track(f"from DRAM, {number + 1}", self.prompts):
                self._resume(engine, "dram", prompt)
            daemon.child.stop()
            daemon = self._daemon()
            time.sleep(SETTLE_S)
            for prompt in self.progress.track(f"from files, {number + 1}", self.prompts):
                self._resume(engine, "file", prompt)

    def _resume(self, engine: Engine, source: str, prompt: Sequence[int]) -> None:
        engine.forget_prefixes()
        self._ask(engine, source, prompt)
        self._ask(engine, "device", prompt)

    def _ask(self, engine: Engine, source: str, prompt: Sequence[int]) -> None:
        seen = self.marks.stat().st_size
        sent_s = time.monotonic()
        reply = engine.ask(prompt, 1)
        with self.marks.open() as file:
            file.seek(seen)
            marks = read_marks(file.read())
        found = stages_of(marks, sent_s, sent_s + reply.ttft_s)
        self.requests.setdefault(source, []).append(found)
        self.ttfts_ms.setdefault(source, []).append(1e3 * reply.ttft_s)

    def _daemon(self) -> Daemon:
        return self.stage.daemon(dram_nbytes=self.dram_nbytes)


def _timed(spec: EngineSpec, target: str) -> EngineSpec:
    ours = with_kvstore(spec, "engine", target)
    assert ours.connector is not None
    connector = {
        **ours.connector,
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "kvstore_bench.waterfall.timed",
    }
    return replace(ours, connector=connector)


@click.command()
@click.option("--model", type=FOLDER, required=True, help="Folder of a checkpoint.")
@click.option("--out", type=FOLDER, default=Path("build/waterfall"), show_default=True)
@click.option("--tokens", type=click.IntRange(256), default=2000, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=6, show_default=True)
@click.option("--passes", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result file instead of a table.")
def main(*, model: Path, out: Path, tokens: int, prompts: int, passes: int, as_json: bool) -> None:
    """Show where the time to the first token of a resumed turn goes, on a real vLLM.

    Each prompt is resumed from DRAM and from files, and beside it as a hit in the engine's own
    cache. Writes waterfall.json and waterfall.png.

    \b
    Example:
      python -m kvstore_bench.waterfall --model build/models/gemma-3-270m
    """
    console = Console(stderr=True)
    progress = Progress(console)
    out = out.resolve()
    machine = describe()
    try:
        kv = kv_shape_of(model)
        spec = EngineSpec(
            "plain", model.resolve(), machine, machine.dtype, machine.threads, 2 * tokens
        )
        drawn = random.Random(0)
        asked = [[drawn.randrange(*TOKENS_RANGE) for _ in range(tokens)] for _ in range(prompts)]
        dram_nbytes = ROOM * prompts * kv.nbytes(tokens, dtype=machine.dtype)
        with Stage(out) as stage:
            marks = stage.scratch / "marks"
            marks.touch()
            course = Course(stage, spec, asked, dram_nbytes, marks, progress)
            course.run(passes)
    except KVStoreError as error:
        console.print(f"[red]waterfall:[/red] {error}", highlight=False)
        sys.exit(EXIT_IMPOSSIBLE)
    result = {**_result(course), "tokens": tokens, "model": model.name, "machine": asdict(machine)}
    (out / "waterfall.json").write_text(json.dumps(result, indent=1))
    plot(result["stages_ms"], out / "waterfall.png", title=f"A resumed turn, {model.name}")
    if as_json:
        click.echo(json.dumps(result))
    else:
        Console().print(_table(result))


def _result(course: Course) -> dict[str, Any]:
    ttft = {source: median(course.ttfts_ms[source]) for source in SOURCES}
    return {
        "ttft_ms": ttft,
        "extra_ms": {source: ttft[source] - ttft["device"] for source in ("dram", "file")},
        "stages_ms": {source: medians(course.requests[source]) for source in SOURCES},
        "requests": course.requests,
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="Milliseconds, medians")
    for column in ("stage", *SOURCES, "what happens"):
        table.add_column(column)
    for row in _rows(result):
        table.add_row(*row)
    return table


def _rows(result: dict[str, Any]) -> Iterator[list[str]]:
    stages = result["stages_ms"]
    for name, (_, _, meaning) in STAGES.items():
        times = [stages[source].get(name) for source in SOURCES]
        yield [name, *("" if each is None else f"{each:.1f}" for each in times), meaning]
    yield ["all", *(f"{result['ttft_ms'][source]:.1f}" for source in SOURCES), ""]


if __name__ == "__main__":
    main()
