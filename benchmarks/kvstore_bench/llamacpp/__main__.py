"""`python -m kvstore_bench.llamacpp`: run, print, write the file; exit 1 if a check failed."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from kvstore.model.errors import KVStoreError
from kvstore.testing.llamacpp import llama_site
from kvstore_bench.console.progress import progress
from kvstore_bench.demo.machine import describe
from kvstore_bench.llamacpp.course import PHASES, SYSTEMS, Course, Plan, Seen, scratch_folder
from kvstore_bench.llamacpp.verdict import Check, checks, numbers
from kvstore_bench.llamacpp.workload import Shape

EXIT_FAILED, EXIT_IMPOSSIBLE = 1, 2
SCHEMA_VERSION = 1
SHAPE = Shape()
TITLES = {
    "kvstore": "kvstore, exact=True",
    "default": "kvstore, exact=False, the default",
    "disk": "LlamaDiskCache",
}


@click.command()
@click.option(
    "--model",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    required=True,
    help="A GGUF file.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("build/demo-llamacpp.json"),
    show_default=True,
)
@click.option("--prompt-tokens", type=click.IntRange(64), default=SHAPE.prompt_tokens)
@click.option("--rounds", type=click.IntRange(1), default=SHAPE.rounds, show_default=True)
@click.option("--conversations", type=click.IntRange(1), default=SHAPE.conversations)
@click.option("--turns", type=click.IntRange(1), default=SHAPE.turns, show_default=True)
@click.option("--first-tokens", type=click.IntRange(1), default=SHAPE.first_tokens)
@click.option("--threads", type=click.IntRange(1), help="Of llama.cpp; all cores otherwise.")
@click.option(
    "--systems", default=",".join(SYSTEMS[1:]), show_default=True, help="Compared with no cache."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result file instead of tables.")
def main(
    *,
    model: Path,
    out: Path,
    prompt_tokens: int,
    rounds: int,
    conversations: int,
    turns: int,
    first_tokens: int,
    threads: int | None,
    systems: str,
    as_json: bool,
) -> None:
    """Measure kvstore on a real llama.cpp, beside no cache and llama-cpp-python's disk cache.

    \b
    make demo-llamacpp
    python -m kvstore_bench.llamacpp --model model.gguf --rounds 5 --systems kvstore
    """
    signal.signal(signal.SIGTERM, _interrupt)  # cleans up as Ctrl-C does
    wanted = tuple(filter(None, systems.split(",")))
    if unknown := set(wanted) - set(SYSTEMS[1:]):
        raise click.BadParameter(f"unknown systems: {', '.join(sorted(unknown))}")
    console = Console(stderr=True)
    site = _site(console)
    machine = describe()
    shape = Shape(
        prompt_tokens, rounds, SHAPE.answer_tokens, conversations, turns, first_tokens=first_tokens
    )
    plan = Plan(model.resolve(), site, shape, threads or machine.cores, ("none", *wanted))
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with (
            scratch_folder(out.parent.resolve()) as scratch,
            progress("asking", plan.asks, quiet=as_json or not console.is_terminal) as say,
        ):
            seen = Course(plan, scratch, say).run()
    except KVStoreError as error:
        console.print(f"demo: {error}", highlight=False)
        sys.exit(EXIT_IMPOSSIBLE)
    judged = checks(found := numbers(seen))
    result = {
        "schema_version": SCHEMA_VERSION,
        "passed": all(check.passed for check in judged),
        **found,
        "checks": [asdict(check) | {"passed": check.passed} for check in judged],
        "model": model.name,
        "threads": plan.threads,
        "exact": True,
        "workload": asdict(shape),
        "machine": asdict(machine),
        "duration_s": round(time.monotonic() - began, 1),
    }
    out.write_text(json.dumps(result, indent=1))
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result, seen, judged)
    sys.exit(0 if result["passed"] else EXIT_FAILED)


def show(result: Mapping[str, Any], seen: Mapping[str, Seen], judged: Sequence[Check]) -> None:
    """Print the times of every system, then the checks."""
    to = Console(width=None if sys.stdout.isatty() else 110)
    title = (
        f"TTFT of {result['workload']['prompt_tokens']} tokens, {result['model']}: "
        f"{result['ttft_cold_s']:.3f} s without a cache"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("system")
    for phase in PHASES:
        table.add_column(f"{phase.replace('_', ' ')} [s]", justify="right")
    table.add_column("conversations [s]", justify="right")
    table.add_column("stored [MB]", justify="right")
    table.add_column("other answers", justify="right")
    for system in (each for each in SYSTEMS if each in seen and each != "none"):
        name = "" if system == "kvstore" else f"{system}_"
        times = [f"{result[f'{name}ttft_{phase}_s']:.3f}" for phase in PHASES]
        table.add_row(
            TITLES[system],
            *times,
            f"{result[f'{name}chat_ttft_s']:.3f}",
            f"{result[f'{name}chat_bytes'] / 1e6:.0f}",
            str(result[f"{name}different_answers"]),
        )
    to.print(table)
    for check in judged:
        mark = "ok" if check.passed else "FAILED"
        to.print(f"{check.field}: {check.value:.3g} (at most {check.limit:g}) {mark}")
    for field in ("slower_than_disk", "default_slower_than_disk"):
        if field in result:
            to.print(f"{field}: {', '.join(result[field]) or 'nowhere'}")


def _site(console: Console) -> Path:
    """Return where llama-cpp-python is, or end."""
    if (site := llama_site()) is None:
        console.print("demo: llama-cpp-python is not here; run `make setup-llamacpp` first")
        sys.exit(EXIT_IMPOSSIBLE)
    return site


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
