"""Every command of a group, for what is made from them: man pages, tests."""

from __future__ import annotations

from collections.abc import Iterator

import click


def walk(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield the context of a command and of everything below it, in the order of `--help`."""
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            if below is not None and not below.hidden:
                yield from walk(below, each, context)
