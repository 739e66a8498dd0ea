"""`kvstore audit`: read the audit log, and find out whether it is whole."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import click

from kvstore.model.errors import ConfigError
from kvstore.model.words import printable
from kvstore.settings import SecuritySettings, load_settings
from kvstore.settings.security import JOURNAL
from kvstore.system.audit_chain import Verdict, audit_key, read_head, split_lines, verify

CHUNK_NBYTES = 1 << 20
FAULTS_SHOWN = 20


@click.group()
def audit() -> None:
    """Read and check the audit log of a daemon. Both commands print JSON with --json.

    \b
    Examples:
      kvstore audit verify --config /etc/kvstore.toml
      kvstore audit show --config /etc/kvstore.toml -n 20
    """


@audit.command("show", short_help="Print the last lines for people.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The daemon's TOML file, which names the log.",
)
@click.option(
    "-n", "count", type=click.IntRange(1, 100_000), default=20, show_default=True, metavar="N"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as the daemon wrote it.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def show(config: Path | None, count: int, as_json: bool, file: Path | None) -> None:
    """Print the last N lines of the audit log; they are not checked.

    \b
    Example:
      kvstore audit show /var/log/kvstore/audit.jsonl -n 50
    """
    (path,) = _files((file,) if file is not None else (), _security(config))
    for line in deque(split_lines(_chunks((path,))), count):
        told = line.decode("utf-8", "replace")
        click.echo(told if as_json else _for_people(told))


def _for_people(line: str) -> str:
    try:
        fields = json.loads(line)
        when = datetime.fromtimestamp(fields.pop("time")).isoformat(sep=" ", timespec="seconds")
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return f"not a line of the log: {line[:80]!r}"
    left_out = ("seq", "mac", "prev")
    told = (printable(f"{name}={value}") for name, value in fields.items() if name not in left_out)
    return " ".join([when, *told])


@audit.command("verify", short_help="Check that no line was changed or cut out.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The daemon's TOML file, which names log and key.",
)
@click.option(
    "--key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The key of the log; default: what the settings say, or FILE.key.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]...")
@click.pass_context
def verify_(
    ctx: click.Context,
    *,
    config: Path | None,
    key: Path | None,
    as_json: bool,
    files: tuple[Path, ...],
) -> None:
    """Check every line of the audit log: exit code 1 if one was changed, added or is missing.

    Name rotated files oldest first; - is the standard input. The end is checked as well, by what
    the daemon noted beside the key.

    \b
    Examples:
      kvstore audit verify --config /etc/kvstore.toml
      kvstore audit verify /var/log/kvstore/audit.jsonl.1 /var/log/kvstore/audit.jsonl
    """
    security = _security(config)
    files = _files(files, security)
    at = key or Path(security.audit_key or f"{files[-1]}.key")
    head = read_head(at.with_name(f"{at.name}.head"))
    found = verify(split_lines(_chunks(files)), audit_key(at), head)
    _say(found, as_json=as_json)
    ctx.exit(1 if found.faults else 0)


def _security(config: Path | None) -> SecuritySettings:
    return load_settings(config).security if config is not None else SecuritySettings()


def _files(given: tuple[Path, ...], security: SecuritySettings) -> tuple[Path, ...]:
    """Return the files that are meant. Raises ConfigError."""
    if given:
        return given
    if security.audit in ("", JOURNAL):
        raise ConfigError("say which file: name it, or --config with security.audit in it")
    return (Path(security.audit),)


def _chunks(files: tuple[Path, ...]) -> Iterator[bytes]:
    for path in files:
        if str(path) == "-":
            yield from _read(sys.stdin.buffer)
            continue
        with path.open("rb") as file:
            yield from _read(file)


def _read(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_NBYTES):
        yield chunk


def _say(found: Verdict, *, as_json: bool) -> None:
    if as_json:
        faults = [{"line": fault.line, "what": fault.what} for fault in found.faults]
        click.echo(json.dumps({"whole": not faults, "lines": found.lines, "faults": faults}))
        return
    for fault in found.faults[:FAULTS_SHOWN]:
        click.echo(f"line {fault.line}: {fault.what}")
    more = len(found.faults) - FAULTS_SHOWN
    if more > 0:
        click.echo(f"... and {more} more")
    if not found.faults:
        click.echo(f"{found.lines} lines, whole")
