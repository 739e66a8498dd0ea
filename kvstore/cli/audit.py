"""`kvstore audit verify`: is the audit log whole, as the daemon wrote it?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from kvstore.model.errors import ConfigError
from kvstore.settings import SecuritySettings, load_settings
from kvstore.system.audit_chain import Verdict, audit_key, read_head, split_lines, verify

CHUNK_NBYTES = 1 << 20
FAULTS_SHOWN = 20


@click.group()
def audit() -> None:
    """Check the audit log of a daemon.

    \b
    Example:
      kvstore audit verify --config /etc/kvstore.toml
    """


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
    security = load_settings(config).security if config is not None else SecuritySettings()
    if not files and security.audit:
        files = (Path(security.audit),)
    if not files:
        raise ConfigError("say which file: kvstore audit verify FILE, or --config")
    at = key or Path(security.audit_key or f"{files[-1]}.key")
    head = read_head(at.with_name(f"{at.name}.head"))
    found = verify(split_lines(_chunks(files)), audit_key(at), head)
    _say(found, as_json=as_json)
    ctx.exit(1 if found.faults else 0)


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
