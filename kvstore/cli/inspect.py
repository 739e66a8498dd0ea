"""`kvstore stats` and `kvstore scan`: look into a daemon."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.cli.namespaces import Start, find_namespace_id, namespace_id_option
from kvstore.cli.target import connect, daemon_options
from kvstore.model.words import duration, rounded, size


@click.command()
@daemon_options
def stats(target: str, as_json: bool) -> None:
    """Print all counters of a daemon: tiers, leases, hits and bytes not yet durable.

    \b
    Examples:
      kvstore stats
      kvstore stats --target /run/kvstore/kvstore.sock --json | jq .dram.used_bytes
    """
    with connect(target) as client:
        found = client.admin.stats()
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = _flat(found, "")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {readable(name, value)}")


@click.command()
@daemon_options
@click.option("--namespace", type=Start(), help=namespace_id_option("Only this namespace."))
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
def scan(target: str, as_json: bool, namespace: str | None, limit: int) -> None:
    """List stored blocks, page by page.

    \b
    Columns: key, namespace, index in its prefix, bytes, and where it is:
    D in DRAM, F durable in the file tier.
    \b
    Examples:
      kvstore scan --limit 10
      kvstore scan --json | jq -r .key
    """
    with connect(target) as client:
        items = client.admin.scan(find_namespace_id(client, namespace), limit=limit)
    if not items and not as_json:
        click.echo("no block is stored" + " in this namespace" * bool(namespace), err=True)
    for item in items:
        if as_json:
            click.echo(
                json.dumps(
                    {
                        "key": item.key.hex(),
                        "namespace": item.namespace_id.hex(),
                        "block": item.block,
                        "nbytes": item.nbytes,
                        "resident": item.resident,
                        "durable": item.durable,
                    }
                )
            )
            continue
        where = ("D" if item.resident else "-") + ("F" if item.durable else "-")
        click.echo(
            f"{item.key.hex()} {item.namespace_id.hex()} {item.block:>6} {item.nbytes:>10} {where}"
        )


def _flat(values: dict[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows += _flat(dict(enumerate(value)), f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def readable(name: str, value: Any) -> str:
    """Return a number of `client.admin.stats` as people read it, by what its name says it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "_bytes" in name:
        return size(value)
    if name.endswith("_s") or ("_seconds" in name and name.endswith(".sum")):
        return duration(value)
    if name == "pid":
        return str(value)
    return f"{value:,.0f}" if value == int(value) else rounded(value, 4)
