"""Run a command as a user would type it, in this process."""

from click.testing import CliRunner, Result

from kvstore.cli import main


def kvstore(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="kvstore", input=stdin)
