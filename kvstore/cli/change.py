"""`kvstore flush`, `delete` and `clear`: change what a daemon holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvstore import Client
from kvstore.cli.namespaces import Start, find_namespace_id, namespace_id_option
from kvstore.cli.target import Hash, connect, daemon_options
from kvstore.model.block import BlockKey
from kvstore.model.errors import Unavailable

_ONLY_OTHERS = "other daemons, not on "  # in what a daemon says that has deleted its own blocks


@click.command()
@daemon_options
@click.option("--wait", "wait_s", type=click.FloatRange(0, 3600), default=30.0, show_default=True)
@click.pass_context
def flush(ctx: click.Context, target: str, as_json: bool, wait_s: float) -> None:
    """Wait until everything committed so far is durable; exit code 1 if it is not.

    It deletes nothing: for that, see `kvstore clear`.

    \b
    Example:
      kvstore flush --wait 60 && systemctl restart kvstore
    """
    with connect(target) as client:
        durable = client.admin.flush(wait_s)
    _say(as_json, {"durable": durable}, "durable" if durable else _NOT_DURABLE)
    ctx.exit(0 if durable else 1)


_NOT_DURABLE = (
    "not durable: no file tier, failing writes, records lost before they were written, a write "
    "budget that is used up, or too little time; see `kvstore stats`"
)


@click.command()
@daemon_options
@click.option(
    "--namespace", type=Start(), required=True, help=namespace_id_option("Namespace of the blocks.")
)
@click.argument("keys", nargs=-1, required=True, type=Hash())
def delete(target: str, as_json: bool, namespace: str, keys: tuple[bytes, ...]) -> None:
    """Delete blocks by KEY. The deletion is durable: a crash does not restore them.

    \b
    Example:
      kvstore delete --namespace 5e88 0a1b... 2c3d...
    """
    with connect(target) as client, _told_of_own():
        only = find_namespace_id(client, namespace)
        assert only is not None
        deleted = client.admin.delete(only, [BlockKey(key) for key in keys])
        reach = _reach(client)
    text = f"deleted {deleted} of {len(keys)} blocks{_in_words(reach)}"
    _say(as_json, {"deleted": deleted} | reach, text)


@click.command()
@daemon_options
@click.option("--namespace", type=Start(), help=namespace_id_option("Clear this namespace."))
@click.option("--all", "everything", is_flag=True, help="Clear every namespace: asks first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(
    *, target: str, as_json: bool, namespace: str | None, everything: bool, yes: bool
) -> None:
    """Delete all blocks of one namespace, or of all. The deletion is durable.

    \b
    Examples:
      kvstore clear --namespace 5e88
      kvstore clear --all --yes
    """
    if everything == (namespace is not None):
        raise click.UsageError("say either --namespace HEX or --all")
    if everything and not yes:
        _ask(target)
    with connect(target) as client, _told_of_own():
        deleted = client.admin.clear(find_namespace_id(client, namespace))
        reach = _reach(client)
    _say(as_json, {"deleted": deleted} | reach, f"deleted {deleted} blocks{_in_words(reach)}")


@contextmanager
def _told_of_own() -> Iterator[None]:
    """Say of a delete that others did not confirm that the daemon itself has done it."""
    try:
        yield
    except Unavailable as error:
        if _ONLY_OTHERS not in str(error):
            raise
        raise click.ClickException(f"this daemon has deleted its own blocks; {error}") from error


def _reach(client: Client) -> dict[str, object]:
    """Return whom a delete reaches beside this daemon: members only, or kept, for those that are
    away as well. Without a fleet, nothing."""
    fleet = client.admin.stats().get("fleet") or {}
    return {"fleet": fleet["deletes"]} if "deletes" in fleet else {}


def _in_words(reach: dict[str, object]) -> str:
    return f", fleet: {reach['fleet']}" if reach else ""


def _ask(target: str) -> None:
    """Return if somebody says so on a terminal. Raises UsageError without one, and Abort."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            "this is no terminal, so nobody can confirm: kvstore clear --all --yes"
        )
    with connect(target) as client:
        blocks = client.admin.stats()["blocks"]
    click.confirm(f"Delete all {blocks:,} blocks of {target}, for good?", abort=True, err=True)


def _say(as_json: bool, values: dict[str, object], text: str) -> None:
    click.echo(json.dumps(values) if as_json else text)
