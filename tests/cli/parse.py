"""Read a command line as `kvstore` would, without doing anything."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvstore.cli import main


def parse(words: Sequence[str]) -> click.Context:
    """Return the context of the command that these words call; the first is `kvstore`.

    Raises click.UsageError for a command, option or value that does not exist, or is missing.
    """
    command: click.Command = main
    name, rest = "kvstore", list(words[1:])
    context: click.Context | None = None
    while True:
        context = command.make_context(name, rest, parent=context)
        if not isinstance(command, click.Group):
            return context
        left = [*context._protected_args, *context.args]
        found, below, rest = command.resolve_command(context, left)
        assert found is not None
        assert below is not None
        name, command = found, below
