"""`kvstore man`: a man page for each command, made from its help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import kvstore
from kvstore.cli.tree import walk
from kvstore.model.errors import InvalidRequest


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.pass_context
def man(ctx: click.Context, directory: Path) -> None:
    """Write a man page for each command into DIRECTORY.

    `man` looks for them in ~/.local/share/man/man1 and /usr/local/share/man/man1.

    \b
    Example:
      kvstore man ~/.local/share/man/man1 && man kvstore-serve
    """
    pages = {_name(each): page(each) for each in walk(ctx.find_root().command, "kvstore")}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (directory / f"{name}.1").write_text(text)
    except OSError as error:
        raise InvalidRequest(f"{directory}: cannot be written: {error.strerror}") from error
    click.echo(f"{directory}: {len(pages)} pages", err=True)


def page(context: click.Context) -> str:
    """Return the man page of one command, in roff's macros `man`."""
    command = context.command
    lines = [
        f'.TH "{_name(context).upper()}" "1" "" "kvstore {kvstore.__version__}" "kvstore"',
        ".SH NAME",
        f"{_plain(_name(context))} \\- {_plain(command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        f"\\fB{_plain(context.command_path)}\\fR "
        + _plain(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(inspect.cleandoc(command.help or "")),
        ".SH OPTIONS",
        *_options(context),
    ]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS", *_commands(context, command)]
    if context.parent is not None:
        lines += [".SH SEE ALSO", f"\\fB{_plain(_name(context.parent))}\\fR(1)"]
    return "\n".join(lines) + "\n"


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs; those that click leaves as they are (after \\b) stay so."""
    for paragraph in re.split(r"\n\s*\n", text):
        kept = paragraph.startswith("\b")
        yield ".PP"
        if kept:
            yield ".nf"
        yield from map(_plain, paragraph.removeprefix("\b").strip("\n").split("\n"))
        if kept:
            yield ".fi"


def _options(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (".TP", f"\\fB{_plain(record[0])}\\fR", _plain(record[1]))


def _commands(context: click.Context, group: click.Group) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            title = _plain(f"{_name(context)}-{name}")
            yield from (".TP", f"\\fB{title}\\fR(1)", _plain(command.get_short_help_str(200)))


def _plain(text: str) -> str:
    """Return text that roff prints as it is: no macro, no escape, hyphens that can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
