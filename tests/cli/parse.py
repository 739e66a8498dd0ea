"""Read a command line as `kvstore` would, without doing anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import click

from kvstore.cli import main


def parse(words: Sequence[str]) -> click.Context:
    """Return the context of the command that these words call; the first is `kvstore`.

    Raises click.UsageError for a command, option or value that does not exist, or is missing. Files
    that options name are opened, and closed again.
    """
    command: click.Command | None = main
    name: str | None = "kvstore"
    rest = list(words[1:])
    context: click.Context | None = None
    with ExitStack() as opened:
        while command is not None:
            context = command.make_context(name, rest, parent=context)
            opened.callback(context.close)
            if not isinstance(command, click.Group):
                break
            left = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, left)
    assert context is not None
    return context
