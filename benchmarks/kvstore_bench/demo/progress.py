"""What the demo says while it runs: one line per step, and a bar while it asks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

T = TypeVar("T")


class Progress:
    """Writes to `console` (standard error), with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """Write one line."""
        self._console.print(f"[dim]{self.elapsed_s:4.0f} s[/dim]  {text}", highlight=False)

    def track(self, title: str, items: Sequence[T]) -> Iterator[T]:
        """Yield the items under a bar that vanishes; then write one line."""
        columns = (TextColumn("        {task.description}"), BarColumn(), MofNCompleteColumn())
        quiet = not self._console.is_terminal
        with Bar(*columns, console=self._console, transient=True, disable=quiet) as bar:
            yield from bar.track(items, description=title)
        self.say(f"{title}: {len(items)} done")
