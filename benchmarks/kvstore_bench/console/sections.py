"""`--help` under headings, for commands with many options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., None]
Options = tuple[Callable[[Command], Command], ...]


class SectionedOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """Lists options under their headings, in the order in which the headings first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one definition list for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                section = getattr(parameter, "section", "Other options")
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def section(name: str) -> Callable[..., Callable[[Command], Command]]:
    """Return a `click.option` whose options stand under a heading."""

    def option(*args: Any, **kwargs: Any) -> Callable[[Command], Command]:
        return click.option(*args, cls=SectionedOption, section=name, **kwargs)

    return option


def add(options: Options, command: Command) -> Command:
    """Apply options; they are listed in --help in the order of the tuple."""
    for option in reversed(options):
        command = option(command)
    return command
