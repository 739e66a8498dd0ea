"""`kvstore --help` and what it leads to, as somebody reads it who sees it for the first time."""

import re
from collections.abc import Iterator

import click
import pytest

from kvstore.cli import main
from kvstore.cli.main import GROUPS
from tests.cli.run import kvstore


def groups() -> Iterator[tuple[str, ...]]:
    """Yield the words that name each group of commands, the first one without any."""
    context = click.Context(main)
    yield ()
    for name in main.list_commands(context):
        if isinstance(main.get_command(context, name), click.Group):
            yield (name,)


@pytest.mark.parametrize("group", list(groups()), ids=" ".join)
def test_no_summary_is_cut(group: tuple[str, ...]) -> None:
    output = kvstore(*group, "--help").output
    rows = re.findall(r"^  ([a-z-]+)  +(\S.*)$", output.partition("--help")[2], re.M)
    assert len(rows) > 1
    for name, summary in rows:
        assert summary.endswith("."), name
        assert not summary.endswith("..."), name


def test_commands_are_listed_by_what_they_are_for() -> None:
    output = kvstore("--help").output
    for title, commands in GROUPS.items():
        section = output.split(f"\n{title}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(commands)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("stat", ["stats", "status", "tenant"]), ("delet", ["delete"]), ("benhc", ["bench"])],
)
def test_a_misspelt_command_names_the_right_one(typed: str, meant: list[str]) -> None:
    done = kvstore(typed, "--json")
    assert done.exit_code == 2
    assert f"Did you mean {' or '.join(meant)}?" in done.output


def test_what_resembles_nothing_gets_no_suggestion() -> None:
    done = kvstore("qqqq")
    assert done.exit_code == 2
    assert "there is no command 'qqqq'.\n" in done.output
