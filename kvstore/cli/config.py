"""`kvstore config`: the settings of a running daemon, and changing those that are live."""

from __future__ import annotations

import json

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.model.errors import ConfigError
from kvstore.settings import Entry


@click.group()
def config() -> None:
    """Show and change the settings of a running daemon.

    A change lasts until the daemon ends. To keep it, put it into the file that `kvstore serve
    --config` reads; SIGHUP makes the daemon read that file again. Both commands need the daemon's
    unix socket. Both print JSON with --json.

    \b
    Examples:
      kvstore config get limits
      kvstore config set dram.capacity=16GiB
    """


@config.command("get", short_help="Print settings.")
@daemon_options
@click.argument("key", required=False)
def get(target: str, as_json: bool, key: str | None) -> None:
    """Print the settings of a running daemon; "live" settings can change while it runs.

    KEY is a setting, such as dram.capacity, or a section, such as limits.

    \b
    Examples:
      kvstore config get
      kvstore config get dram.capacity
      kvstore config get limits --json
    """
    with connect(target) as client:
        found = [each for each in client.admin.settings() if _is_meant(each, key)]
    if not found:
        raise ConfigError(f"no setting is called {key}: `kvstore config get` lists them")
    if as_json:
        told = {each.key: {"value": each.value, "live": each.live} for each in found}
        click.echo(json.dumps(told))
        return
    for each in found:
        click.echo(f"{each.key} = {each.value}{'  # live' if each.live else ''}")


@config.command("set", short_help="Change live settings.")
@daemon_options
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 60),
    default=5.0,
    show_default=True,
    help="Seconds to wait until usage is below a lowered cap.",
)
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_(target: str, as_json: bool, wait_s: float, assignments: tuple[str, ...]) -> None:
    """Change live settings of a running daemon: all of them, or none.

    A change ends with the daemon: the command prints the lines that keep it in the --config file.
    Raising a cap evicts nothing. Lowering a cap evicts blocks, unused and already written ones
    first, and returns the memory. Leased blocks are evicted when their leases end.

    \b
    Examples:
      kvstore config set dram.capacity=16GiB
      kvstore config set file.write_per_day=2TiB file.scrub=0
      kvstore config set server.log_level=debug
    """
    with connect(target) as client:
        changed, pending = client.admin.configure(assignments, wait_s)
    if as_json:
        told = [{"key": key, "before": before, "after": after} for key, before, after in changed]
        click.echo(json.dumps({"changed": told, "pending": pending}))
        return
    if not changed:
        click.echo("nothing changed: these are the current values")
        return
    for key, before, after in changed:
        click.echo(f"{key}: {before} -> {after}")
    if pending:
        click.echo(f"not done yet, continues in the background: {pending}")
    click.echo("\nThis lasts until the daemon ends. To keep it, put this into its --config file:\n")
    for line in _as_toml({key: after for key, _, after in changed}):
        click.echo(line)


def _is_meant(entry: Entry, key: str | None) -> bool:
    return key is None or entry.key == key or entry.key.startswith(f"{key}.")


def _as_toml(values: dict[str, str]) -> list[str]:
    lines: list[str] = []
    section = ""
    for key, value in values.items():
        name, _, item = key.partition(".")
        if name == "tenants":
            tenant, _, item = item.partition(".")
            name = f"{name}.{tenant}"
        if name != section:
            lines.append(f"[{name}]")
            section = name
        lines.append(f"{item} = {value}")
    return lines
