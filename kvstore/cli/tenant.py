"""`kvstore tenant`: who shares a running daemon, and what each of them may use."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.model.words import percent, size
from kvstore.settings import TenantSettings
from kvstore.settings.values import declared, parse, toml_key, toml_value

ERASED = {
    "forgotten": "The key service has forgotten its key: no copy of the data opens again.",
    "backups": "Its keys are destroyed here; a backup of the directory that has them opens with "
    "the root key.",
    "none": "It was not encrypted: what a disk has not overwritten yet can still be read from it.",
}


@click.group()
def tenant() -> None:
    """Show, add, change and delete the tenants of a running daemon.

    A change lasts until the daemon ends: put it into the file that `kvstore serve --config` reads,
    too. The daemon's own socket is needed, or an admin's token. All print JSON with --json.

    \b
    Examples:
      kvstore tenant list
      kvstore tenant add acme dram.guaranteed=1GiB weight=2
    """


@tenant.command("list", short_help="List tenants and what they use.")
@daemon_options
def list_(target: str, as_json: bool) -> None:
    """List the tenants of a daemon: what each uses, what it may use now, its hits and its socket.

    \b
    Example:
      kvstore tenant list --json | jq .acme.dram.used_bytes
    """
    with connect(target) as client:
        told = client.admin.stats()
    tenants: dict[str, Any] = told.get("tenants", {})
    if as_json:
        click.echo(json.dumps(tenants))
        return
    for name, left in told.get("leaving", {}).items():
        click.echo(f"{name}: is being deleted, its calls are refused. Left: {left or 'under way'}")
    if "tenants" not in told:
        click.echo("this daemon has one user and no tenants")
    for name, stats in tenants.items():
        dram, file, totals = stats["dram"], stats["file"], stats["totals"]
        hits = sum(totals.get("hit_blocks", {}).values())
        click.echo(
            f"{name}: {stats['blocks']} blocks, {size(dram['used_bytes'])} of "
            f"{size(dram['capacity_bytes'])} dram, {size(file['physical_bytes'])} of "
            f"{size(file['capacity_bytes'])} file, {stats['sessions']} sessions, "
            f"{percent(hits, totals.get('lookup_blocks', 0))} hits, unix:{stats['socket']}"
        )


@tenant.command("add", short_help="Add a tenant.")
@daemon_options
@click.argument("name")
@click.argument("assignments", nargs=-1, metavar="[KEY=VALUE]...")
def add(target: str, as_json: bool, name: str, assignments: tuple[str, ...]) -> None:
    """Add tenant NAME to a running daemon. KEY is one of [tenants.NAME], such as dram.guaranteed.

    \b
    Examples:
      kvstore tenant add acme
      kvstore tenant add beta dram.guaranteed=2GiB arena=sealed
    """
    with connect(target) as client:
        path = client.admin.add_tenant(name, assignments)
    if as_json:
        click.echo(json.dumps({"name": name, "socket": path}))
        return
    click.echo(f"{name}: unix:{path}")
    _keep(name, assignments)


@tenant.command("set", short_help="Change what a tenant may use.")
@daemon_options
@click.argument("name")
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_(target: str, as_json: bool, name: str, assignments: tuple[str, ...]) -> None:
    """Change live settings of tenant NAME: all of them, or none.

    \b
    Example:
      kvstore tenant set acme weight=3 dram.max=12GiB
    """
    with connect(target) as client:
        changed, pending = client.admin.configure([f"tenants.{name}.{a}" for a in assignments], 5.0)
    if as_json:
        told = [{"key": key, "before": before, "after": after} for key, before, after in changed]
        click.echo(json.dumps({"changed": told, "pending": pending}))
        return
    for key, before, after in changed:
        click.echo(f"{key}: {before} -> {after}")
    if pending:
        click.echo(f"not done yet, continues in the background: {pending}")
    _keep(name, assignments)


@tenant.command("delete", short_help="Delete a tenant and all that is stored of it.")
@daemon_options
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(ctx: click.Context, target: str, as_json: bool, name: str, yes: bool) -> None:
    """End the sessions of tenant NAME, destroy its keys and delete its blocks, on every tier.

    Exit code 1 if something of it is left: its calls stay refused, and this can be run again. It
    tells how far nothing can be read again.

    \b
    Example:
      kvstore tenant delete acme --yes
    """
    if not yes:
        click.confirm(f"Delete everything that is stored of {name}?", abort=True, err=True)
    with connect(target) as client:
        blocks, erased, left = client.admin.delete_tenant(name)
    if as_json:
        click.echo(json.dumps({"name": name, "blocks": blocks, "erased": erased, "left": left}))
    elif left:
        click.echo(f"{name} is not deleted yet. Left: {left}")
        click.echo(f"Its calls are refused. Run `kvstore tenant delete {name}` again.")
    else:
        click.echo(f"{name} is deleted: {blocks} blocks. {ERASED.get(erased, erased)}")
        click.echo(f"Remove [tenants.{name}] from the settings, too.")
    ctx.exit(1 if left else 0)


def _keep(name: str, assignments: tuple[str, ...]) -> None:
    click.echo("\nThis lasts until the daemon ends. To keep it, put this into its --config file:\n")
    click.echo(f"[tenants.{name}]")
    items = {toml_key(item): item for item in declared(TenantSettings)}
    types = get_type_hints(TenantSettings)
    for each in assignments:
        key, _, value = (part.strip() for part in each.partition("="))
        item = items[key]
        click.echo(f"{key} = {toml_value(item, parse(item, types[item.name], value))}")
