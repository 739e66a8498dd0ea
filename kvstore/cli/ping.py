"""`kvstore ping`: does a daemon answer, and how soon?"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator

import click

from kvstore.cli.kind import check_finite
from kvstore.cli.target import connect, daemon_options
from kvstore.client import Client
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.model.words import duration

WAIT_STEP_S = 0.1


@click.command()
@daemon_options
@click.option(
    "-c", "--count", type=click.IntRange(1, 1_000_000), default=1, show_default=True, metavar="N"
)
@click.option(
    "-i",
    "--interval",
    "interval_s",
    type=click.FloatRange(0, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between an answer and the next ping.",
)
@click.option(
    "-w",
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    metavar="SECONDS",
    help="Seconds to wait for a daemon that is starting.",
)
@click.pass_context
def ping(
    ctx: click.Context,
    *,
    target: str,
    as_json: bool,
    count: int,
    interval_s: float,
    wait_s: float,
) -> None:
    """Measure a daemon's round trip time; Ctrl-C ends it, and counts what was asked until then.

    Exit code 3 if no daemon answers, 1 if some of N pings got no answer.

    \b
    Examples:
      kvstore ping
      kvstore ping -c 5 -i 0.2
      kvstore serve & kvstore ping --wait 10
      kvstore ping --json | jq .round_trip_s
    """
    check_finite({"interval": interval_s, "wait": wait_s})
    times, version = list[float](), ""
    failures, last = 0, KVStoreError("nothing was asked")
    _wait_for(target, wait_s)
    try:
        with connect(target) as client:
            for number in range(count):
                if number:
                    time.sleep(interval_s)
                try:
                    took_s, version = _ping(client)
                except Unavailable as error:
                    failures, last = failures + 1, error
                    if not as_json and count > 1:
                        click.echo(f"no answer: {error}")
                    continue
                times.append(took_s)
                if not as_json:
                    click.echo(f"PONG from kvstore {version} at {target} in {duration(took_s)}")
    except KeyboardInterrupt:  # the usual way out of many
        if not (times or failures):
            raise
    if not times:
        raise last
    asked = len(times) + failures
    if as_json:
        about = {"target": target, "version": version, "asked": asked, "answered": len(times)}
        click.echo(json.dumps(about | {"round_trip_s": statistics.median(times), "times_s": times}))
    elif count > 1:
        click.echo("".join(_summary(times, asked)))
    ctx.exit(1 if failures else 0)


def _wait_for(target: str, wait_s: float) -> None:
    """Return when a daemon answers, or `wait_s` have passed: then the first question says why."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            with connect(target) as client:
                _ping(client)
            return
        except Unavailable:
            time.sleep(WAIT_STEP_S)


def _ping(client: Client) -> tuple[float, str]:
    client.connect()
    began = time.perf_counter()
    version = client.admin.ping()
    return time.perf_counter() - began, version


def _summary(times: list[float], count: int) -> Iterator[str]:
    yield f"{len(times)} of {count} answered; "
    yield f"least {duration(min(times))}, median {duration(statistics.median(times))}, "
    yield f"most {duration(max(times))}"
