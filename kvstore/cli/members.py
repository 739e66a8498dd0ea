"""`kvstore members`: the daemons of a fleet, as one of them sees them."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.model.words import duration, size

STRANGERS_MAX = 32
COLUMNS = (
    "NODE",
    "ADDRESS",
    "STATE",
    "VERSION",
    "ROUND TRIP",
    "LINK",
    "BORROWED",
    "LENT",
    "VIEW",
    "BREAKER",
    "DEMERITS",
)


@click.command()
@daemon_options
@click.pass_context
def members(ctx: click.Context, target: str, as_json: bool) -> None:
    """List the daemons that share what they hold; exit code 1 if one is not up, or if nobody has
    answered at an address that is listed.

    VIEW is how old is what this daemon knows of the other one's prefixes.

    \b
    Examples:
      kvstore members
      kvstore members --target unix:/run/kvstore/kvstore.sock
      kvstore members --json | jq -r '.members[] | select(.state != "up") | .address'
    """
    with connect(target) as client:
        stats = client.admin.stats()
    fleet = stats.get("fleet")
    if fleet is None:
        alone = "this daemon is alone: set cluster.membership, see `kvstore serve --print-config`"
        click.echo(json.dumps({"members": []}) if as_json else alone)
        return
    if as_json:
        click.echo(json.dumps(fleet))
    else:
        click.echo("\n".join(_screen(fleet)))
    all_up = all(each["state"] == "up" for each in fleet["members"])
    ctx.exit(0 if all_up and not fleet["membership"].get("unknown") else 1)


def _screen(fleet: dict[str, Any]) -> list[str]:
    kept = fleet["membership"]
    lines = [
        f"fleet {fleet['fleet']}, membership {kept['membership']}, links {fleet['secured']}",
        f"this daemon is {fleet['node']} at {fleet['address']}, {fleet['state']}",
    ]
    if kept["away_s"] is not None:
        lines.append(f"{kept['membership']} has been out of reach for {duration(kept['away_s'])}")
    if kept["error"]:
        lines.append(kept["error"])
    strangers = _strangers(kept)
    if not fleet["members"]:
        return [*lines, "no other daemon is known", *strangers]
    rows = [COLUMNS, *map(_row, fleet["members"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    errors = [f"{m['node'][:8]}: {m['last_error']}" for m in fleet["members"] if _is_wrong(m)]
    return [*lines, "", *table, *errors, *strangers]


def _strangers(kept: dict[str, Any]) -> list[str]:
    """Return a line for each address that is listed and where nobody is a member."""
    unknown, errors = kept.get("unknown", ()), kept.get("errors", {})
    shown = [f"nobody at {each}: {errors.get(each, 'not asked yet')}" for each in unknown]
    left_out = len(shown) - STRANGERS_MAX
    return [*shown[:STRANGERS_MAX], f"({left_out} more)"] if left_out > 0 else shown


def _row(member: dict[str, Any]) -> tuple[str, ...]:
    trip, age_s = member["round_trip_s"], member.get("view_age_s")
    return (
        member["node"][:8],
        member["address"],
        member["state"],
        member["version"],
        "-" if trip is None else duration(trip),
        member["link"] or "-",
        size(member["borrowed_bytes"]),
        size(member["lent_bytes"]),
        "-" if age_s is None else f"{duration(age_s)} old",
        member["breaker"].replace("_", " "),
        str(member["demerits"]),
    )


def _is_wrong(member: dict[str, Any]) -> bool:
    return member["state"] != "up" and bool(member["last_error"])
