"""`kvstore slow`: what took longest, and what it waited for."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.model.words import SHORT_CHARS, duration, printable, size
from kvstore.rpc.v1 import kvstore_pb2 as pb

SHOWN = 20


@click.command()
@daemon_options
@click.option("--kind", type=click.Choice(["acquire", "load", "save"]), help="Only these.")
@click.option(
    "--over",
    "over_s",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="Only what took at least so long.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=SHOWN,
    show_default=True,
    help="How many, the longest first.",
)
@click.option("--reset", is_flag=True, help="Forget them after they are shown.")
def slow(
    *, target: str, as_json: bool, kind: str | None, over_s: float, limit: int, reset: bool
) -> None:
    """Show the longest acquires, loads and saves of a day, and what they waited for.

    An acquire is a request for a prefix; a load brings blocks into the arena from a slower tier; a
    save is a reservation, a commit, or a batch written behind. Waits may overlap. The daemon keeps
    the 64 longest of each kind.

    \b
    Examples:
      kvstore slow
      kvstore slow --kind acquire --over 0.05
      kvstore slow --json | jq -c '{took_s, waits, request_id}'
      kvstore slow --reset
    """
    with connect(target) as client:
        found = client.admin.slow(kind or "", over_s=over_s, limit=limit, reset=reset)
    for item in found.items:
        click.echo(json.dumps(_item_json(item)) if as_json else _line(item))
    if not found.items and not as_json:
        click.echo(f"nothing in the last {duration(found.kept_s)}")


def _item_json(item: pb.SlowItem) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "took_s": item.took_s,
        "age_s": item.age_s,
        "waits": dict(item.waits),
        "request_id": item.request_id,
        "client": item.client,
        "session_id": item.session_id,
        "namespace": item.namespace_id.hex(),
        "blocks": item.blocks,
        "nbytes": item.nbytes,
        "result": item.result,
    }


def _line(item: pb.SlowItem) -> str:
    waits = sorted(item.waits.items(), key=lambda each: -each[1])
    waited = ", ".join(f"{duration(seconds)} {what}" for what, seconds in waits if seconds)
    nbytes = f", {size(item.nbytes)}" if item.nbytes else ""
    whose = [
        f"request {item.request_id}" if item.request_id else "",
        f"conversation {item.session_id}" if item.session_id else "",
        f"from {item.client}" if item.client else "",
        f"namespace {item.namespace_id.hex()[:SHORT_CHARS]}",
    ]
    return (
        f"{duration(item.took_s):>9}  {item.kind:<7}  {duration(item.age_s)} ago, "
        f"{item.blocks} blocks{nbytes}, {item.result}; waited for {waited or 'nothing'}; "
        + printable(", ".join(filter(None, whose)))
    )
