"""A progress bar on stderr, where somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what advances the bar by one and shows a text beside it; `quiet` draws nothing."""
    if quiet:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )  # fmt: skip
    # Twice a second: drawing takes the time of the thread that measures.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=2
    ) as bar:
        task = bar.add_task(title, total=total, last="")
        yield lambda text: bar.update(task, advance=1, last=text)
