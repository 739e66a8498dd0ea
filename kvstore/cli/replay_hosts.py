"""The part of `kvstore replay` that is about many hosts: its options, and its results as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from kvstore.model.words import rounded, size
from kvstore.replay import HOSTS_MAX, ROUTERS, HostsResult, Workload
from kvstore.replay.routers import LOAD_BOUND


def hosts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a replay over many hosts."""
    for option in (
        click.option(
            "--hosts",
            type=click.IntRange(1, HOSTS_MAX),
            help="Replay over so many hosts that lend each other blocks. Sizes are those of each.",
        ),
        click.option(
            "--router",
            metavar="NAME[,NAME...]",
            help=f"With --hosts, what sends requests to hosts: {', '.join(ROUTERS)} [random].",
        ),
        click.option(
            "--view-age",
            type=click.FloatRange(0, 86400),
            metavar="SECONDS",
            help="With --hosts, how old what they know of each other may be; default: as in the"
            " daemon, 1 s or a second for every 32 peers.",
        ),
        click.option(
            "--load-bound",
            type=click.FloatRange(1),
            metavar="FACTOR",
            help="With --router kv, most requests of a host in 10 s, as a multiple of the mean"
            f" [{LOAD_BOUND}].",
        ),
    ):
        command = option(command)
    return command


def routers(hosts: int | None, names: str | None, **others: object) -> Sequence[str]:
    """Return the routers that were asked for; none without --hosts. Raises UsageError for options
    that do not go together."""
    given = [name for name, value in others.items() if value is not None]
    if hosts is None:
        only = [n for n in ("view_age", "load_bound") if n in given]
        if names is not None or only:
            raise click.UsageError("--router, --view-age and --load-bound need --hosts")
        return ()
    for name in ("restart_at", "plot"):
        if name in given:
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} is for one host: leave out --hosts, or --{option}")
    found = [each.strip() for each in (names or ROUTERS[0]).split(",")]
    for name in found:
        if name not in ROUTERS:
            raise click.UsageError(f"--router {name}: write one of {', '.join(ROUTERS)}")
    if "load_bound" in given and "kv" not in found:
        raise click.UsageError("--load-bound is for --router kv")
    return found


_COLUMNS = (
    ("hosts", 6), ("router", 11), ("dram each", 10), ("file each", 10), ("own %", 7),
    ("peers %", 7), ("computed %", 10), ("one host %", 10), ("of it", 7), ("between hosts", 13),
    ("asked", 9), ("in vain", 8), ("view", 10), ("age s", 6), ("busiest", 8), ("blocks/s", 10),
)  # fmt: skip


def lines(result: HostsResult, *, with_head: bool) -> Iterator[str]:
    if with_head:
        yield ""
        yield " ".join(f"{name:>{width}}" for name, width in _COLUMNS)
    setup, hit = result.setup, result.own_hit_ratio + result.peer_hit_ratio
    cells = (
        f"{result.fleet.hosts:,}",
        result.fleet.router,
        size(setup.dram_blocks * setup.record_nbytes),
        size(setup.file_blocks * setup.file_record_nbytes) if setup.file_blocks else "-",
        f"{100 * result.own_hit_ratio:.2f}",
        f"{100 * result.peer_hit_ratio:.2f}",
        f"{100 * (1 - hit):.2f}",
        f"{100 * result.one.token_hit_ratio:.2f}",
        f"{100 * result.hit_tokens:.1f} %",
        size(result.peer_bytes),
        f"{result.lent.asked:,}",
        f"{result.lent.vain:,}",
        size(result.view_bytes),
        rounded(result.staleness.max_s),
        f"{result.busiest:,}",
        f"{result.blocks_per_s:,.0f}",
    )
    yield " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def as_dict(workload: Workload, result: HostsResult) -> dict[str, Any]:
    about = {"trace": workload.name, "format": workload.format, "skipped": workload.skipped}
    return result.to_dict() | about
