"""`python -m kvstore_bench.long`: run, print, write the files; exit 1 if a check failed."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console

from kvstore.model.errors import KVStoreError
from kvstore_bench.demo.machine import describe
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage
from kvstore_bench.demo.table import checks_table
from kvstore_bench.long.course import Course, Plan
from kvstore_bench.long.model import TOKENS_MAX, make_model
from kvstore_bench.long.picture import plot
from kvstore_bench.long.snapshots import Snapshots
from kvstore_bench.long.verdict import checks_of, numbers_of

EXIT_FAILED = 1
EXIT_IMPOSSIBLE = 2
FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--out", type=FOLDER, default=Path("build/long"), show_default=True)
@click.option("--json", "target", type=FILE, default=Path("build/long.json"), show_default=True)
@click.option(
    "--lengths",
    default="8192,32768,131072",
    show_default=True,
    help="Tokens of the prompts, ascending.",
)
@click.option("--passes", type=click.IntRange(1), default=3, show_default=True)
@click.option("--restarts", type=click.IntRange(1), default=2, show_default=True)
def main(*, out: Path, target: Path, lengths: str, passes: int, restarts: int) -> None:
    """Measure long prompts on a real vLLM: cold, from DRAM, from files, after SIGKILL, through an
    arena that is smaller than the prompt, with engines killed and stopped half way.

    Writes a JSON file with snapshots of all tiers, long.png beside the logs.

    \b
    Example:
      python -m kvstore_bench.long --lengths 2048,8192 --passes 1 --restarts 1
    """
    signal.signal(signal.SIGTERM, _interrupt)  # it cleans up as after Ctrl-C
    wanted = _lengths(lengths)
    console = Console(stderr=True)
    progress = Progress(console)
    machine = describe()
    out = out.resolve()
    try:
        with Stage(out) as stage, Snapshots() as snapshots:
            model = stage.scratch / "model"
            make_model(model)
            plan = Plan(model, machine, wanted, passes, restarts)
            course = Course(plan, stage, progress, snapshots)
            course.run()
    except KVStoreError as error:
        console.print(f"[red]long:[/red] {error}", highlight=False)
        sys.exit(EXIT_IMPOSSIBLE)
    fields = numbers_of(course)
    checks = checks_of(fields, wanted[-1], stage.leaks)
    passed = all(check.passed for check in checks)
    result = {
        **fields,
        "passed": passed,
        "answers": [asdict(each) for each in course.answered],
        "hung_found": course.hung,
        "dead_found": course.dead,
        "leaks_found": stage.leaks,
        "snapshots": snapshots.rows(),
        "machine": asdict(machine),
        "duration_s": round(progress.elapsed_s, 1),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1))
    where = machine.gpu or f"{machine.cores} CPU cores"
    plot(course.answered, snapshots.taken, out / "long.png", title=f"Long prompts on {where}")
    Console().print(checks_table(checks))
    sys.exit(0 if passed else EXIT_FAILED)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        wanted = tuple(int(each) for each in text.split(","))
    except ValueError:
        wanted = ()
    if not wanted or list(wanted) != sorted(set(wanted)) or not 1024 <= wanted[0] <= TOKENS_MAX:
        raise click.BadParameter(f"--lengths {text}: numbers from 1024 to {TOKENS_MAX}, ascending")
    if wanted[-1] > TOKENS_MAX:
        raise click.BadParameter(f"--lengths {text}: the model takes {TOKENS_MAX} at most")
    return wanted


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
