"""`kvstore token`: the file of tokens that a daemon lets in over TCP."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.cli.kind import Kind
from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.tenant import DEFAULT_TENANT, Role, check_tenant_name, role_of
from kvstore.model.words import duration
from kvstore.settings import load_settings
from kvstore.system.token_file import TokenEntry, changing, make_token, read_tokens

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_NEVER = "never"


class Lifetime(Kind[float]):
    """Seconds of "90d", "12h", "30min" or "45s"; 0 for "never"."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = re.fullmatch(r"(\d{1,6})(s|min|h|d)", str(value))
        if value == _NEVER:
            return 0.0
        if found is None or not int(found[1]):
            self.fail(f"{value!r} is not a time: write 90d, 12h, 30min or {_NEVER}", param, ctx)
        return float(int(found[1]) * _UNITS[found[2]])


class TenantName(Kind[str]):
    """A tenant's name."""

    name = "tenant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return check_tenant_name(str(value))
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


def _file_options(command: F) -> F:
    file = click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The file that security.tokens names.",
    )
    config = click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The daemon's TOML file, which names it.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return file(config(as_json(command)))


def _file_of(file: Path | None, config: Path | None) -> Path:
    """Return the file that is meant. Raises ConfigError."""
    if file is not None:
        return file
    named = load_settings(config).security.tokens if config is not None else ""
    if not named:
        raise ConfigError("say which file: --file PATH, or --config with security.tokens in it")
    return Path(named)


@click.group()
def token() -> None:
    """Create, list and revoke the tokens that a daemon lets in over TCP.

    The file holds digests, not tokens. A running daemon reads it again when it changes, so that a
    revoked token is refused within two seconds. Two valid tokens at once let you replace one
    without a gap: create, hand out, revoke the old one. All commands print JSON with --json.

    \b
    Examples:
      kvstore token create --file /etc/kvstore/tokens --role writer --expires 90d
      kvstore token list --file /etc/kvstore/tokens
    """


@token.command("create", short_help="Create a token and print it once.")
@_file_options
@click.option(
    "--tenant", type=TenantName(), default=DEFAULT_TENANT, show_default=True, help="Whose it is."
)
@click.option(
    "--role",
    type=click.Choice([role.word for role in Role]),
    required=True,
    help="What its holder may do.",
)
@click.option(
    "--expires",
    "lifetime_s",
    type=Lifetime(),
    default="90d",
    show_default=True,
    help="When it ends: 90d, 12h, 30min, or never.",
)
@click.option("--note", default="", help="What it is for; `kvstore token list` shows it.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this file, mode 0600, instead of printing it.",
)
def create(
    *,
    file: Path | None,
    config: Path | None,
    as_json: bool,
    tenant: str,
    role: str,
    lifetime_s: float,
    note: str,
    out: Path | None,
) -> None:
    """Create a token. It is shown once: only its digest is kept.

    \b
    Examples:
      kvstore token create --file /etc/kvstore/tokens --role writer --expires 90d
      kvstore token create --config /etc/kvstore.toml --role reader --out new.token
    """
    not_after = time.time() + lifetime_s if lifetime_s else 0.0
    text, entry = make_token(tenant, role_of(role), not_after=not_after, note=note)
    with changing(_file_of(file, config)) as entries:
        entries.append(entry)
        if out is not None:
            _write_private(out, text)
    if as_json:
        click.echo(json.dumps(_told(entry) | ({} if out is not None else {"token": text})))
        return
    click.echo(text if out is None else f"token {entry.id} is in {out}")


@token.command("list", short_help="List tokens, without their secrets.")
@_file_options
def list_(file: Path | None, config: Path | None, as_json: bool) -> None:
    """List the tokens of the file: id, tenant, role, when each ends, note.

    \b
    Examples:
      kvstore token list --file /etc/kvstore/tokens
      kvstore token list --config /etc/kvstore.toml --json
    """
    entries = read_tokens(_file_of(file, config))
    if as_json:
        click.echo(json.dumps([_told(entry) for entry in entries]))
        return
    if not entries:
        click.echo("no tokens: kvstore token create --role writer")
    for entry in entries:
        ends = _ends(entry)
        line = f"{entry.id}  {entry.tenant:<12}  {entry.role:<8}  {ends:<16}  {entry.note}"
        click.echo(line.rstrip())


@token.command("revoke", short_help="Revoke tokens by id.")
@_file_options
@click.option("--expired", is_flag=True, help="Also remove all that have expired.")
@click.argument("ids", nargs=-1, metavar="ID...")
def revoke(
    file: Path | None, config: Path | None, as_json: bool, expired: bool, ids: tuple[str, ...]
) -> None:
    """Remove tokens from the file. Calls that they let in end within two seconds.

    \b
    Example:
      kvstore token revoke --file /etc/kvstore/tokens --expired
    """
    if not ids and not expired:
        raise click.UsageError("say which: ID..., as `kvstore token list` shows them, or --expired")
    now = time.time()
    with changing(_file_of(file, config)) as entries:
        unknown = set(ids) - {entry.id for entry in entries}
        if unknown:
            raise InvalidRequest(f"no token has the id {', '.join(sorted(unknown))}")
        gone = [
            entry.id
            for entry in entries
            if entry.id in ids or (expired and not entry.is_valid(now))
        ]
        entries[:] = [entry for entry in entries if entry.id not in gone]
    if as_json:
        click.echo(json.dumps({"revoked": gone}))
        return
    click.echo(f"revoked {', '.join(gone)}" if gone else "nothing to revoke")


def _write_private(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{text}\n")


def _told(entry: TokenEntry) -> dict[str, Any]:
    valid = entry.is_valid(time.time())
    return {
        "id": entry.id,
        "tenant": entry.tenant,
        "role": entry.role,
        "not_after": entry.not_after or None,
        "valid": valid,
        "note": entry.note,
    }


def _ends(entry: TokenEntry) -> str:
    if not entry.not_after:
        return "does not end"
    left_s = entry.not_after - time.time()
    return f"ends in {duration(left_s)}" if left_s > 0 else "expired"
