"""`python -m kvstore_bench.demo`: run, print, write the files; exit 1 if a check failed."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from kvstore.model.errors import KVStoreError
from kvstore_bench.demo import forms_verdict, native, verdict, workload
from kvstore_bench.demo.course import PHASES, Course, Plan
from kvstore_bench.demo.machine import describe
from kvstore_bench.demo.model import kv_shape_of
from kvstore_bench.demo.picture import plot
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage
from kvstore_bench.demo.table import print_result

EXIT_FAILED = 1
EXIT_IMPOSSIBLE = 2
SCHEMA_VERSION = 1
PIPED_COLUMNS = 110
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--model", type=FOLDER, required=True, help="Folder of a checkpoint with a tokenizer.json."
)
@click.option("--out", type=FOLDER, default=Path("build/demo"), show_default=True)
@click.option(
    "--phases",
    default=",".join(PHASES),
    show_default=True,
    help="Phases to run after the first two, which always run.",
)
@click.option("--native", "with_native", is_flag=True, help="Compare with vLLM's own offloading.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto")
@click.option("--threads", type=click.IntRange(1), help="OpenMP threads of each engine on a CPU.")
@click.option("--keep", is_flag=True, help="Keep what the daemon stored.")
@click.option("--json", "as_json", is_flag=True, help="Print the result file instead of tables.")
def main(
    *,
    model: Path,
    out: Path,
    phases: str,
    with_native: bool,
    dtype: str,
    threads: int | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Measure kvstore on a real vLLM: no connector, DRAM, a second engine, everything killed.

    Writes result.json, ttft.png, workload.json and logs; with --native, native.json and native.png.
    """
    # A terminated run must clean up as one that Ctrl-C ended does.
    signal.signal(signal.SIGTERM, _interrupt)
    wanted = frozenset(filter(None, phases.split(",")))
    if unknown := wanted - set(PHASES):
        raise click.BadParameter(f"unknown phases: {', '.join(sorted(unknown))}")
    console = Console(stderr=True)
    try:
        machine = describe()
        plan = Plan(
            model=model.resolve(),
            kv=kv_shape_of(model),
            machine=machine,
            dtype=machine.dtype if dtype == "auto" else dtype,
            threads=threads or machine.threads,
            phases=wanted,
        )
        questions = workload.build(workload.Shape(), *workload.tokenizer_of(model))
        passed = run(
            plan,
            questions,
            out.resolve(),
            Progress(console),
            with_native=with_native,
            keep=keep,
            as_json=as_json,
        )
    except KVStoreError as error:
        console.print(f"[red]demo:[/red] {error}", highlight=False)
        sys.exit(EXIT_IMPOSSIBLE)
    sys.exit(0 if passed else EXIT_FAILED)


def run(
    plan: Plan,
    questions: workload.Workload,
    out: Path,
    progress: Progress,
    *,
    with_native: bool,
    keep: bool,
    as_json: bool,
) -> bool:
    """Run one course, print and write what came out; return whether every check passed."""
    out.mkdir(parents=True, exist_ok=True)
    with Stage(out, keep=keep) as stage:
        kind = native.NativeCourse if with_native else Course
        course = kind(plan, questions, stage, progress)
        course.run()
    judge = native.judge if with_native else verdict.judge
    found = judge(course, stage.leaks)
    result = {
        "schema_version": SCHEMA_VERSION,
        "passed": found.passed,
        **found.numbers,
        "checks": [
            asdict(check) | {"passed": check.passed, "missed": check.missed}
            for check in found.checks
        ],
        "phases": verdict.phase_summaries(course.book),
        "capacity": forms_verdict.capacity(course.book),
        "cold_pairs_s": course.pairs,
        "wrong": found.wrong,
        "leaks_found": stage.leaks,
        **_circumstances(plan, questions, progress),
    }
    names = ("native.json", "native.png") if with_native else ("result.json", "ttft.png")
    result_name, plot_name = names
    (out / result_name).write_text(json.dumps(result, indent=1))
    workload.save(questions, course.book.answers, out / "workload.json")
    plot(course.book, out / plot_name, title=_title(plan))
    if as_json:
        click.echo(json.dumps(result))
    else:
        print_result(
            result, found.checks, Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
        )
    return found.passed


def _title(plan: Plan) -> str:
    where = plan.machine.gpu or f"{plan.machine.cores} CPU cores"
    return f"{plan.model.name} in {plan.dtype} on {where}, one request at a time"


def _circumstances(plan: Plan, questions: workload.Workload, progress: Progress) -> dict[str, Any]:
    return {
        "model": plan.model.name,
        "dtype": plan.dtype,
        "threads": plan.threads,
        "workload": asdict(questions.shape),
        "machine": asdict(plan.machine),
        "duration_s": round(progress.elapsed_s, 1),
    }


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
