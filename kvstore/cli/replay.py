"""`kvstore replay`: what would the cache have hit?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import click

from kvstore.cli import replay_hosts, replay_table
from kvstore.cli.model import model_options, ratio_options
from kvstore.cli.outputs import check_outputs, check_plot
from kvstore.cli.replay_asked import Asked, Replays
from kvstore.cli.replay_mix import mixed
from kvstore.cli.replay_plot import check_matplotlib, plot_results
from kvstore.decide.policy import policy_by_name
from kvstore.model.block import RECORD_NBYTES_MAX
from kvstore.model.errors import ConfigError
from kvstore.plan import ModelKV, load_model
from kvstore.replay import FORMATS, RECLAIMS, Result, Setup, Workload, load_workload
from kvstore.replay.bounds import Bounds
from kvstore.settings import ADMISSIONS, DramSettings, FileSettings, parse_size

KV_BYTES_PER_TOKEN = "128KiB"
DAY_S = 86400.0


@click.command("replay")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--dram",
    default="5%",
    show_default=True,
    metavar="SIZE[,SIZE...]",
    help="Size of dram: a share of all blocks in the trace (5%), or bytes (64GiB).",
)
@click.option(
    "--file",
    "file_",
    default="0",
    metavar="SIZE[,SIZE...]",
    help="Size of the file tier; default: no file tier.",
)
@click.option("--policy", metavar="NAME", help="Eviction policy of all tiers: lru, hz, ...")
@click.option(
    "--dram-policy", metavar="NAME", help="Eviction policy of dram; default: that of `serve`."
)
@click.option(
    "--file-policy",
    metavar="NAME",
    help="Eviction policy of the file tier; default: that of `serve`.",
)
@click.option("--compare", metavar="NAME,...", help="Replay once for each of these policies.")
@click.option(
    "--admission",
    type=click.Choice(ADMISSIONS),
    default="all",
    show_default=True,
    help="Blocks to write to the file tier: all at once, those about to be evicted from dram, or"
    " those used again.",
)
@click.option(
    "--write-budget",
    default="0",
    metavar="SIZE",
    help="Bytes per day that may be written to the file tier (500GiB), or a share of all blocks in"
    " the trace over its length (50%). Half an hour of it may be saved up or overdrawn."
    " 0: no limit.",
)
@click.option(
    "--reclaim",
    type=click.Choice(RECLAIMS),
    default="punch",
    show_default=True,
    help="How the file tier frees space: punch holes, as the daemon does, or rewrite the live"
    " records of whole segments.",
)
@click.option(
    "--hints",
    metavar="end:SHARE",
    help="Share of the sessions that announce their end, e.g. end:0.5.",
)
@click.option(
    "--format", "format_", type=click.Choice(FORMATS), help="Format of TRACE; default: recognized."
)
@click.option("--lenient", is_flag=True, help="Skip broken lines and count them.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 65536),
    help="Join blocks to this size, a multiple of the trace's.",
)
@click.option(
    "--kv-bytes-per-token",
    metavar="SIZE",
    help="KV of one token, all layers and ranks. Default: what the trace says, or"
    f" {KV_BYTES_PER_TOKEN} (Llama-3.1-8B in 16 bits).",
)
@model_options
@ratio_options
@click.option(
    "--restart-at",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Restart after this share of the requests: dram is lost, the file tier stays.",
)
@click.option("--max-requests", type=click.IntRange(1), help="Replay only the first requests.")
@click.option(
    "--window-hours",
    type=click.FloatRange(0.001),
    help="End the trace there. Sessions without a common clock are spread over this time (24).",
)
@click.option(
    "--seed", default=1, show_default=True, help="Seed of random session starts and hints."
)
@click.option(
    "--mix",
    multiple=True,
    metavar="MODEL=SECONDS",
    help="Prefill seconds per 1,000 tokens of a model that the trace names. TRACE=SECONDS replays"
    " another trace beside it, of a model of its own; for TRACE itself, say its name. Prints the"
    " seconds that hits save, and what they would save if no policy knew the costs.",
)
@replay_hosts.hosts_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per replay.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write a table as well.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw hit ratio over size: .png, .svg or .pdf."
)
def replay_command(
    *, trace: Path, as_json: bool, csv_path: Path | None, plot: Path | None, **options: Any
) -> None:
    """Send a recorded trace through this release's planner and policies.

    It moves no bytes and needs no daemon. TRACE is a trace of Mooncake, Bailian, Weka, LMCache
    agents, vLLM's multi-turn conversations, or `kvstore trace`, compressed (.gz) or not. It prints
    hit ratios of prompt tokens beside those of an infinite cache and of the offline optimum of the
    same size, which no policy can beat.

    With --hosts, requests go to many hosts that lend each other blocks, and the line says what each
    source gave: the host itself, its peers, or nobody. Beside it is one host with all their room.

    \b
    Examples:
      kvstore replay trace.jsonl.gz --dram 64GiB --file 2TiB
      kvstore replay trace.jsonl.gz --dram 1%,2%,5%,10% --compare lru,hz --plot hits.png
      kvstore replay trace.jsonl.gz --policy hz --hints end:0.5 --json
      kvstore replay trace.jsonl.gz --model /models/llama --file 1TiB --write-budget 500GiB
      kvstore replay trace.jsonl.gz --dram 64GiB --ratio 1.38
      kvstore replay trace.jsonl.gz --dram 64GiB --file 1TiB --ratio 1.8 --file-ratio 3.0
      kvstore replay trace.jsonl --lenient --max-requests 10000 --csv hits.csv
      kvstore replay trace.jsonl.gz --hosts 8 --dram 64GiB --router random,affinity,kv
      kvstore replay 70b.jsonl.gz --mix 70b.jsonl.gz=2 --mix 1b.jsonl.gz=0.1 --dram 5%
    """
    check_outputs(csv_path)
    _check_plot(plot)
    asked = Asked(**options)
    routers = replay_hosts.routers(
        asked.hosts,
        asked.router,
        view_age=asked.view_age,
        load_bound=asked.load_bound,
        restart_at=asked.restart_at,
        plot=plot,
    )
    share = _end_share(asked.hints)
    pairs = _policies(asked.policy, asked.dram_policy, asked.file_policy, asked.compare)
    if asked.model is not None and asked.kv_bytes_per_token is not None:
        raise click.UsageError("--model gives the bytes per token: leave out --kv-bytes-per-token")
    kv = load_model(asked.model, kv_dtype=asked.kv_dtype) if asked.model is not None else None
    workload, mix = mixed(trace, asked, lambda path: _read(path, asked))
    nbytes = _record_nbytes(asked.kv_bytes_per_token, kv, workload)
    setups = _setups(asked, pairs, workload, nbytes)
    bounds = Bounds(workload)
    replays = Replays(workload, bounds, asked, share, kv, mix=mix)
    rows: list[dict[str, Any]] = []
    results: list[Result] = []
    if not as_json:
        click.echo("\n".join(replay_table.about(workload, nbytes, bounds)))
    for setup in setups:
        for row, text in (
            replays.over_hosts(setup, routers) if routers else replays.one(setup, results)
        ):
            click.echo(json.dumps(row) if as_json else text)
            rows.append(row)
    if csv_path is not None:
        replay_table.write_csv(csv_path, rows)
    if plot is not None:
        plot_results(results, plot, title=f"{workload.name}: {len(workload.requests):,} requests")


def _check_plot(plot: Path | None) -> None:
    check_plot(plot)
    if plot is not None:
        check_matplotlib()


# ---- what was asked for ------------------------------------------------------------------------


def _read(trace: Path, asked: Asked) -> Workload:
    with _reading() as done:
        return load_workload(
            trace,
            format=asked.format_,
            lenient=asked.lenient,
            block_tokens=asked.block_tokens,
            requests_max=asked.max_requests,
            window_hours=asked.window_hours,
            seed=asked.seed,
            progress=done,
        )


def _setups(
    asked: Asked, pairs: Sequence[tuple[str, str]], workload: Workload, nbytes: int
) -> list[Setup]:
    """Return a setup for each pair of sizes and each pair of policies.

    nbytes: of a block as the engine has it. A share of all blocks is a share of these bytes.
    """
    stored = max(1, round(nbytes / asked.ratio))
    in_files = max(1, round(nbytes / (asked.file_ratio or asked.ratio)))
    return [
        Setup(
            dram_blocks=int(_nbytes("--dram", dram_size, workload, nbytes)) // stored,
            file_blocks=int(_nbytes("--file", file_size, workload, nbytes)) // in_files,
            dram_policy=of_dram,
            file_policy=of_file,
            admission=asked.admission,
            write_bytes_per_day=_per_day(asked.write_budget, workload, nbytes),
            reclaim=asked.reclaim,
            record_nbytes=stored,
            file_record_nbytes=in_files,
        )
        for dram_size, file_size in product(asked.dram.split(","), asked.file_.split(","))
        for of_dram, of_file in pairs
    ]


def _end_share(hints: str | None) -> float:
    if hints is None:
        return 0.0
    kind, _, number = hints.partition(":")
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if kind != "end" or not 0.0 <= share <= 1.0:
        raise click.UsageError(f"--hints {hints}: write end:SHARE, from end:0 to end:1")
    return share


def _policies(
    both: str | None, dram: str | None, file: str | None, compare: str | None
) -> list[tuple[str, str]]:
    """Return the policies of dram and file for each replay. Raises ConfigError for unknown ones."""
    if compare is not None and any((both, dram, file)):
        raise click.UsageError(
            "--compare names the policies: leave out --policy, --dram-policy and --file-policy"
        )
    shipped = (DramSettings().eviction_policy, FileSettings().eviction_policy)
    if compare is not None:
        pairs = [(name.strip(), name.strip()) for name in compare.split(",")]
    else:
        pairs = [(dram or both or shipped[0], file or both or shipped[1])]
    for pair in pairs:
        for name in pair:
            policy_by_name(name)
    return pairs


def _record_nbytes(per_token: str | None, model: ModelKV | None, workload: Workload) -> int:
    """Return the bytes of a block, as told, else by the trace, else by KV_BYTES_PER_TOKEN."""
    nbytes = parse_size(per_token or KV_BYTES_PER_TOKEN) * workload.block_tokens
    if model is not None:
        prompts = [request.tokens for request in workload.requests]
        nbytes = round(model.mean_bytes_per_token(prompts) * workload.block_tokens)
    elif per_token is None and workload.block_nbytes:
        nbytes = workload.block_nbytes
    if not 1 <= nbytes <= RECORD_NBYTES_MAX:
        raise ConfigError(
            f"a block of {workload.block_tokens} tokens would have"
            f" {nbytes:,} bytes; {RECORD_NBYTES_MAX:,} are allowed"
        )
    return nbytes


def _nbytes(option: str, text: str, workload: Workload, nbytes: int) -> float:
    """Return the bytes of a size; of a percentage: of all blocks there are."""
    text = text.strip()
    if not text.endswith("%"):
        return parse_size(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ConfigError(f"{option} {text}: write a percentage like 5%, or bytes like 64GiB")
    return int(share * workload.unique_blocks) * nbytes


def _per_day(text: str, workload: Workload, nbytes: int) -> int:
    """Return the write budget in bytes a day."""
    found = _nbytes("--write-budget", text, workload, nbytes)
    if not text.strip().endswith("%"):
        return int(found)
    return max(1, int(found * DAY_S / max(1.0, workload.seconds))) if found else 0


# ---- progress ----------------------------------------------------------------------------------


@contextmanager
def _reading() -> Iterator[Callable[[int], None]]:
    """Count on stderr where somebody looks at it: how long a trace is shows when it was read."""
    if not sys.stderr.isatty():
        yield lambda requests: None
        return
    yield lambda requests: click.echo(f"\rreading {requests:,} requests", nl=False, err=True)
    click.echo("\r\033[K", nl=False, err=True)
