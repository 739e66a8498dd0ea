"""`kvstore bench events` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, measuring, show

PARTS = ("speed", "memory", "index", "faults")


@click.command(short_help="Measure what KV events cost, and how true an index is.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Of puts with events and without; in whole eights.",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Measure this alone; may be repeated.  [default: all]",
)
@click.option(
    "--indexer",
    "site",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where `pip install --no-deps --target DIR ai-dynamo-runtime` has put Dynamo's indexer.",
)
@JSON
def events(*, rounds: int, parts: tuple[str, ...], site: Path | None, as_json: bool) -> None:
    """Measure KV events with Dynamo's indexer as the router's index.

    Puts a second with events and without, in turns; the time from a commit to the indexer's answer;
    memory for each block; whether the indexer says of every prompt what the daemon has, after
    100,000 stores and evictions from both tiers, and after daemon, indexer or both were killed, or
    the link was cut for 10 s. Takes about five minutes.

    \b
    Examples:
      kvstore bench events --json | jq .put_ratio_with_events
      kvstore bench events --part faults
    """

    def say(text: str) -> None:
        click.echo(text, err=True)

    with measuring(as_json, "zmq"):
        from kvstore_bench.events import speed, truth
        from kvstore_bench.events.stage import EventsPlan

        plan, result = EventsPlan(rounds=rounds), dict[str, Any]()
        wanted = parts or PARTS
        if "speed" in wanted:
            result |= speed.visible(plan, site)
            result |= speed.put_ratio(plan, say)
        if "memory" in wanted:
            result |= speed.memory(plan)
        if "index" in wanted:
            result |= truth.index_equals(plan, site)
        if "faults" in wanted:
            result |= truth.faults(plan, site, say)
        show(result, as_json, ratio_tables.print_events)
