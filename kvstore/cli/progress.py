"""A bar on stderr that says how far a command has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress(label: str, length: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Draw a bar, if it is to be shown; yields what is told of each step.

    click's own `hidden` came with a release later than the oldest that is supported.
    """
    if not shown:
        yield lambda _: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update
