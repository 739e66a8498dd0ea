"""`kvstore monitor`: requests as they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import Any

import click

from kvstore.cli.namespaces import Start, find_namespace_id, namespace_id_option
from kvstore.cli.target import connect, daemon_options, shown
from kvstore.client import AsyncClient
from kvstore.model.words import duration, printable, size
from kvstore.rpc.v1 import kvstore_pb2 as pb

TIERS = ("dram", "file", "object", "peer", "pool")


@click.command()
@daemon_options
@click.option("--namespace", type=Start(), help=namespace_id_option("Only of this namespace."))
@click.option("--request", default="", metavar="ID", help="Only ids that start so.")
@click.option("--tier", type=click.Choice(TIERS), help="Only what was served something from it.")
@click.option("--misses", is_flag=True, help="Only requests whose hit ended early.")
@click.option("--kind", type=click.Choice(["acquire", "save"]), help="Only these.")
@click.option("--count", type=click.IntRange(1), help="End after so many.")
@click.option("--seconds", type=click.FloatRange(min=0.1), help="End after so long.")
def monitor(
    *,
    target: str,
    as_json: bool,
    namespace: str | None,
    request: str,
    tier: str | None,
    misses: bool,
    kind: str | None,
    count: int | None,
    seconds: float | None,
) -> None:
    """Watch requests as the daemon answers them; Ctrl-C ends it.

    Engines never wait for this command: what it does not take in time is dropped, counted, and said
    at the end (with --json, in lines of their own). Prompts are not shown.

    \b
    Examples:
      kvstore monitor
      kvstore monitor --misses --namespace 5e88
      kvstore monitor --json --tier file | jq -c .hit_blocks
    """
    with connect(target) as client:
        only = find_namespace_id(client, namespace)
    wanted = {
        "namespace_id": only,
        "request_id": request,
        "tier": tier or "",
        "misses_only": misses,
        "kind": kind or "",
    }
    shows = _Shows(count, as_json=as_json)
    asyncio.run(_watch(target, wanted, shows, seconds))
    if not as_json:
        dropped = f"; {shows.dropped} more were not taken in time" if shows.dropped else ""
        click.echo(f"{shows.shown} requests{dropped}", err=True)


class _Shows:
    """Prints what comes."""

    def __init__(self, count: int | None, *, as_json: bool) -> None:
        self.shown = self.dropped = 0
        self._count = count
        self._as_json = as_json

    def take(self, reply: pb.MonitorReply) -> bool:
        """Print a batch; say whether it was the last one."""
        for answered in reply.answered:
            click.echo(json.dumps(answered_json(answered)) if self._as_json else _line(answered))
            self.shown += 1
            if self.shown == self._count:
                return True
        if reply.dropped > self.dropped:
            self.dropped = reply.dropped
            if self._as_json:
                click.echo(json.dumps({"dropped": self.dropped}))
        return False


async def _watch(target: str, wanted: dict[str, Any], shows: _Shows, seconds: float | None) -> None:
    client = AsyncClient(target, arena=False, name="monitor", **shown())
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            async with (
                asyncio.timeout(seconds),
                contextlib.aclosing(client.admin.monitor(**wanted)) as replies,
            ):
                async for reply in replies:
                    if shows.take(reply):
                        break
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await client.close()


def answered_json(answered: pb.Answered) -> dict[str, Any]:
    """Return a request as `kvstore monitor --json` prints it."""
    outcome = answered.outcome
    told: dict[str, Any] = {
        "time": answered.at,
        "kind": answered.kind,
        "request_id": outcome.request_id,
        "client": outcome.client,
        "session_id": outcome.session_id,
        "namespace": outcome.namespace_id.hex(),
        "blocks": outcome.asked_blocks,
        "block_tokens": answered.block_tokens,
        "took_s": outcome.took_s,
        "last_key": outcome.last_key.hex(),
    }
    if answered.kind == "save":
        return told | {
            "first_block": answered.first_block,
            "stored_records": answered.stored_records,
            "existing_records": answered.existing_records,
            "refused_records": answered.refused_records,
            "nbytes": answered.nbytes,
        }
    has_ending = outcome.HasField("ending")
    return told | {
        "skip_blocks": outcome.skip_blocks,
        "hit_blocks": outcome.hit_blocks,
        "ranges": [[each.begin, each.end, each.tier] for each in answered.ranges],
        "ended_by": outcome.ending.reason if has_ending else "complete",
        "ended_at": outcome.ending.block if has_ending else None,
    }


def _line(answered: pb.Answered) -> str:
    outcome = answered.outcome
    at = time.strftime("%H:%M:%S", time.localtime(answered.at))
    whose = printable(outcome.request_id or outcome.session_id or outcome.client or "?")
    if answered.kind == "save":
        refused = f", {answered.refused_records} refused" if answered.refused_records else ""
        return (
            f"{at}  save     {whose}: {outcome.asked_blocks} blocks from block "
            f"{answered.first_block} on, {answered.stored_records} records, "
            f"{size(answered.nbytes)}{refused}, in {duration(outcome.took_s)}"
        )
    parts = ", ".join(
        f"{each.end - each.begin} {each.tier or 'missing'}" for each in answered.ranges
    )
    ended = ""
    if outcome.HasField("ending"):
        ended = f"; ended at block {outcome.ending.block} by {outcome.ending.reason}"
    return (
        f"{at}  acquire  {whose}: {outcome.hit_blocks} of {outcome.asked_blocks} blocks "
        f"({parts or 'none'}) in {duration(outcome.took_s)}{ended}"
    )
