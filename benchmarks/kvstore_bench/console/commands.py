"""What the commands of `kvstore bench` share: options, errors, progress, and showing a result."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from kvstore_bench.console.exits import check_targets, explained, need, needs
from kvstore_bench.console.progress import progress

JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
PATH = click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default=".",
    help="Directory on the device to measure; a scratch folder in it is used.  [default: here]",
)

MODEL = click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkpoint of transformers whose KV is coded.  [default: made-up KV]",
)


@contextmanager
def measuring(as_json: bool, *modules: str, plot: Path | None = None) -> Iterator[None]:
    """Explain what makes a run impossible; `modules` and what its output needs must be there."""
    with explained():
        need(*modules, *needs(as_json=as_json, plot=plot))
        check_targets(plot)
        yield


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does: its daemons stop, and its files go. For the main
    thread."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def steps(title: str, total: int, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows a step on stderr: a bar on a terminal, a line a step elsewhere."""
    if as_json or not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    with progress(title, total, quiet=False) as say:
        yield say


def show(result: dict[str, Any], as_json: bool, table: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=1))
    else:
        table(result)


def thread_counts(text: str, most: int) -> list[int]:
    """Return numbers of threads from text such as "1,2,4". most: of each. Raises BadParameter."""
    try:
        counts = [int(each) for each in text.split(",") if each.strip()]
    except ValueError:
        counts = [0]
    if not all(1 <= each <= most for each in counts):
        raise click.BadParameter(f"--threads {text}: numbers from 1 to {most}")
    return counts
