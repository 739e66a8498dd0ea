"""`kvstore trace`: make traces, of a live daemon's traffic or out of numbers."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvstore.cli.demand import demand_of, traffic_options
from kvstore.cli.namespaces import Start, find_namespace_id, namespace_id_option
from kvstore.cli.progress import progress
from kvstore.cli.target import connect, daemon_options, shown
from kvstore.cli.trace_file import TraceWriter, writing
from kvstore.client import AsyncClient
from kvstore.model.errors import KVStoreError
from kvstore.model.words import duration, rounded, size
from kvstore.replay.mixes import MIXES, mix_named, synthesize_mix
from kvstore.replay.recording import Recorded
from kvstore.replay.synth import KINDS, Asked, synthesize_trace
from kvstore.settings import parse_size

PROGRESS_REQUESTS = 1000


@click.group("trace")
def trace() -> None:
    """Make traces for `kvstore replay` and `kvstore plan`: recorded or synthetic.

    Both commands summarize what they wrote, as JSON with --json.

    \b
    Examples:
      kvstore trace record now.jsonl.gz --seconds 3600
      kvstore trace synth agents.jsonl.gz --kind agent --requests 100000
    """


# ---- synth -------------------------------------------------------------------------------------


@trace.command(short_help="Synthesize traffic.")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--requests",
    type=click.IntRange(1, 1_000_000_000),
    default=10_000,
    show_default=True,
    help="Number of requests.",
)
@click.option("--seed", default=1, show_default=True, help="The same seed makes the same trace.")
@partial(traffic_options, kinds=[*KINDS, *MIXES])
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def synth(
    *,
    output: Path,
    requests: int,
    seed: int,
    kind: str,
    rate: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Synthesize the traffic of multi-turn chats, of agents, or a mix.

    OUTPUT has Mooncake's format, with session_id and turn; a name that ends in .gz compresses it.
    Sessions are in progress when the trace starts, so the rate is constant. Memory use does not
    grow with the number of requests.

    The kinds chat and agent take the options below. All others are mixes of several streams, for
    comparing policies, and take --rate alone: documents that many ask about, scans that never
    return, batches, day and night, a change half way, several models (each line names its own).

    \b
    DRAWS is a distribution to draw numbers from:
      constant:V  uniform:LOW,HIGH  exponential:MEAN  geometric:MEAN  lognormal:MEDIAN,SIGMA

    \b
    Examples:
      kvstore trace synth chat.jsonl.gz --requests 100000 --rate 10
      kvstore trace synth agents.jsonl.gz --kind agent --turns geometric:60 --gap-s lognormal:5,1
      kvstore trace synth hot.jsonl.gz --prefixes 1000 --prefix-exponent 1.2 --seed 7
      kvstore trace synth shift.jsonl.gz --kind shift-chat-agents --requests 20000
    """
    asked = _asked(kind, rate, options, requests, seed)
    summary = _Summary()
    shows = sys.stderr.isatty()
    with writing(output) as file, progress("synthesizing", requests, shown=shows) as advance:
        for number, each in enumerate(asked, 1):
            file.write(each.to_mooncake())
            summary.add(each.at_s, each.tokens, first=each.first)
            if number % PROGRESS_REQUESTS == 0:
                advance(PROGRESS_REQUESTS)
    _tell(output, file, summary, as_json=as_json)


def _asked(
    kind: str, rate: float | None, options: dict[str, Any], requests: int, seed: int
) -> Iterator[Asked]:
    """Return the requests of a kind or a mix."""
    if kind in KINDS:
        return synthesize_trace(demand_of(kind, rate, options), requests=requests, seed=seed)
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise click.UsageError(
            f"{', '.join(sorted(given))}: the mix {kind} takes --rate alone; --kind chat and agent"
            " take these"
        )
    return synthesize_mix(mix_named(kind, rate), requests=requests, seed=seed)


@dataclass(slots=True)
class _Summary:
    """What a trace has."""

    requests: int = 0
    sessions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    requests_per_s: float = 0.0
    dropped: int = 0
    repeated: int = 0

    def add(self, at_s: float, tokens: int, *, first: bool = False) -> None:
        self.requests += 1
        self.sessions += first
        self.tokens += tokens
        self.seconds = max(self.seconds, at_s)
        self.requests_per_s = self.requests / self.seconds if self.seconds else 0.0


def _tell(output: Path, file: TraceWriter, summary: _Summary, *, as_json: bool) -> None:
    if as_json:
        found = {"output": str(output), "nbytes": file.nbytes, **asdict(summary)}
        click.echo(json.dumps(found))
        return
    about = f" of {summary.sessions:,} sessions" if summary.sessions else ""
    click.echo(
        f"{output}: {summary.requests:,} requests{about} in {duration(summary.seconds)}"
        f" ({rounded(summary.requests_per_s)}/s), {summary.tokens:,} prompt tokens,"
        f" {size(file.nbytes)} before compression"
    )
    if summary.dropped:
        click.echo(
            f"{summary.dropped:,} requests were dropped because this command did not keep up:"
            " use a smaller --sample"
        )
    if summary.repeated:
        click.echo(f"{summary.repeated:,} lookups repeated a request and were left out")


# ---- record ------------------------------------------------------------------------------------


@trace.command(short_help="Record the requests to a running daemon.")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@daemon_options
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    help="Seconds to record; by default until Ctrl-C or another limit.",
)
@click.option("--requests", type=click.IntRange(1), help="End after so many requests.")
@click.option(
    "--size",
    "size_",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    help="End before OUTPUT exceeds this size, measured before compression.",
)
@click.option(
    "--sample",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of the prefixes to record: all requests of a prefix, or none.",
)
@click.option(
    "--sample-block",
    type=click.IntRange(0, 100_000),
    default=0,
    show_default=True,
    help="Block that tells prefixes apart for --sample. If most requests share a system prompt,"
    " choose a block after it; requests that end before that block are left out.",
)
@click.option("--namespace", type=Start(), help=namespace_id_option("Record only this namespace."))
def record(
    *,
    output: Path,
    target: str,
    as_json: bool,
    seconds: float | None,
    requests: int | None,
    size_: str,
    sample: float,
    sample_block: int,
    namespace: str | None,
) -> None:
    """Record the requests to a running daemon as a trace for `kvstore replay`.

    Each line is one requested prefix: the time, the engine, the length of its hit, and its blocks
    by number. The daemon has no tokens. It hashes keys again with a secret that it forgets at the
    end, so a trace does not reveal whether a known prompt was asked. The daemon never waits for
    this command: records that it does not take in time are dropped and counted.

    \b
    Examples:
      kvstore trace record monday.jsonl.gz --seconds 86400 --sample 0.1
      kvstore trace record now.jsonl.gz && kvstore replay now.jsonl.gz --dram 64GiB,128GiB
    """
    limits = _Limits(seconds, requests, parse_size(size_))
    only = None
    with connect(target) as client:
        client.admin.ping()
        if namespace is not None:
            only = find_namespace_id(client, namespace)
    sampled = {"share": sample, "block": sample_block, "namespace_id": only}
    summary = _Summary()
    failure: KVStoreError | None = None
    try:
        with writing(output) as file:
            asyncio.run(_record(target, sampled, file, summary, limits))
    except KVStoreError as error:  # what came until then is in the file
        failure = error
    if failure is None or summary.requests:
        _tell(output, file, summary, as_json=as_json)
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class _Limits:
    """When a recording ends."""

    seconds: float | None
    requests: int | None
    nbytes: int

    def reached(self, file: TraceWriter) -> bool:
        return file.nbytes >= self.nbytes or file.rows == self.requests


async def _record(
    target: str,
    sampled: dict[str, Any],
    file: TraceWriter,
    summary: _Summary,
    limits: _Limits,
) -> None:
    """Record until a limit is reached, a signal comes or the daemon ends."""
    client = AsyncClient(target, arena=False, name="trace record", **shown())
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    taking = asyncio.create_task(_take(client, sampled, file, summary, limits))
    stopping = asyncio.create_task(told.wait())
    waits: set[asyncio.Task[Any]] = {taking, stopping}
    try:
        await asyncio.wait(waits, timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        ended, _ = await asyncio.gather(taking, stopping, return_exceptions=True)
        await client.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if isinstance(ended, Exception):
        raise ended


async def _take(
    client: AsyncClient,
    sampled: dict[str, Any],
    file: TraceWriter,
    summary: _Summary,
    limits: _Limits,
) -> None:
    recorded, told = Recorded(secrets.token_bytes(32)), False
    try:
        async for reply in client.admin.record(**sampled):
            summary.dropped = reply.dropped
            for row in recorded.rows(reply.lookups):
                file.write(row)
                summary.add(row["at_s"], row["block_tokens"] * len(row["hash_ids"]))
                if limits.reached(file):
                    return
            summary.repeated = recorded.repeated
            if sys.stderr.isatty():
                text = f"\rrecorded {summary.requests:,}, dropped {summary.dropped:,}"
                click.echo(text, nl=False, err=True)
                told = True
    finally:
        if told:
            click.echo(err=True)  # the summary begins a line of its own
