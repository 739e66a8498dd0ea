"""`kvstore replay`: what would the cache have hit?"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import click

from kvstore.cli.model import model_options
from kvstore.cli.outputs import check_outputs, check_plot
from kvstore.cli.replay_plot import check_matplotlib, plot_results
from kvstore.cli.words import size
from kvstore.decide.policy import policy_by_name
from kvstore.model.block import RECORD_NBYTES_MAX
from kvstore.model.errors import ConfigError
from kvstore.plan import ModelKV, load_model
from kvstore.replay import FORMATS, RECLAIMS, Result, Setup, Workload, load_workload, replay
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per replay.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write a table as well.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw hit ratio over size: .png, .svg or .pdf."
)
def replay_command(
    *,
    trace: Path,
    dram: str,
    file_: str,
    policy: str | None,
    dram_policy: str | None,
    file_policy: str | None,
    compare: str | None,
    admission: str,
    write_budget: str,
    reclaim: str,
    hints: str | None,
    format_: str | None,
    lenient: bool,
    block_tokens: int | None,
    kv_bytes_per_token: str | None,
    model: Path | None,
    kv_dtype: str,
    restart_at: float | None,
    max_requests: int | None,
    window_hours: float | None,
    seed: int,
    as_json: bool,
    csv_path: Path | None,
    plot: Path | None,
) -> None:
    """Send a recorded trace through this release's planner and policies.

    It moves no bytes and needs no daemon. TRACE is a trace of Mooncake, Bailian, Weka, LMCache
    agents, vLLM's multi-turn conversations, or `kvstore trace`, compressed (.gz) or not. It prints
    hit ratios of prompt tokens beside those of an infinite cache and of the offline optimum of the
    same size, which no policy can beat.

    \b
    Examples:
      kvstore replay trace.jsonl.gz --dram 64GiB --file 2TiB
      kvstore replay trace.jsonl.gz --dram 1%,2%,5%,10% --compare lru,hz --plot hits.png
      kvstore replay trace.jsonl.gz --policy hz --hints end:0.5 --json
      kvstore replay trace.jsonl.gz --model /models/llama --file 1TiB --write-budget 500GiB
      kvstore replay trace.jsonl --lenient --max-requests 10000 --csv hits.csv
    """
    check_outputs(csv_path)
    check_plot(plot)
    if plot is not None:
        check_matplotlib()
    share = _end_share(hints)
    pairs = _policies(policy, dram_policy, file_policy, compare)
    if model is not None and kv_bytes_per_token is not None:
        raise click.UsageError("--model tells the bytes per token: leave out --kv-bytes-per-token")
    kv = load_model(model, kv_dtype=kv_dtype) if model is not None else None
    with _reading() as done:
        workload = load_workload(
            trace,
            format=format_,
            lenient=lenient,
            block_tokens=block_tokens,
            requests_max=max_requests,
            window_hours=window_hours,
            seed=seed,
            progress=done,
        )
    nbytes = _record_nbytes(kv_bytes_per_token, kv, workload)
    setups = [
        Setup(
            dram_blocks=_blocks("--dram", dram_size, workload, nbytes),
            file_blocks=_blocks("--file", file_size, workload, nbytes),
            dram_policy=of_dram,
            file_policy=of_file,
            admission=admission,
            write_bytes_per_day=_per_day(write_budget, workload, nbytes),
            reclaim=reclaim,
            record_nbytes=nbytes,
        )
        for dram_size, file_size in product(dram.split(","), file_.split(","))
        for of_dram, of_file in pairs
    ]
    bounds = Bounds(workload)
    results = []
    if not as_json:
        click.echo("\n".join(_about(workload, nbytes, bounds)))
    for setup in setups:
        with _replaying(len(workload.requests)) as done:
            result = replay(
                workload,
                setup,
                bounds,
                end_hints=share,
                restart_at=restart_at,
                seed=seed,
                prefill_flops=kv.prefill_flops if kv is not None else None,
                progress=done,
            )
        results.append(result)
        if as_json:
            click.echo(json.dumps(_as_dict(workload, result)))
        else:
            click.echo("\n".join(_lines(result, with_head=len(results) == 1)))
    if csv_path is not None:
        _write_csv(csv_path, [_as_dict(workload, result) for result in results])
    if plot is not None:
        plot_results(results, plot, title=f"{workload.name}: {len(workload.requests):,} requests")


# ---- what was asked for ------------------------------------------------------------------------


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
        raise click.UsageError("--compare names the policies: leave out --policy and its kin")
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


def _blocks(option: str, text: str, workload: Workload, nbytes: int) -> int:
    """Return how many blocks a size is."""
    return int(_nbytes(option, text, workload, nbytes)) // nbytes


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


# ---- what is answered ----------------------------------------------------------------------------


def _about(workload: Workload, nbytes: int, bounds: Bounds) -> Iterator[str]:
    yield (
        f"{workload.name} ({workload.format}): {len(workload.requests):,} requests in"
        f" {workload.seconds / 3600:.3g} h, {workload.tokens:,} prompt tokens"
    )
    yield (
        f"{workload.unique_blocks:,} blocks of {workload.block_tokens} tokens,"
        f" {size(workload.unique_blocks * nbytes)} of KV"
    )
    yield f"an infinite cache hits {100 * bounds.infinite():.2f} % of the tokens"
    if workload.skipped:
        yield f"skipped {workload.skipped:,} broken lines; the first: line {workload.first_skipped}"


_COLUMNS = (
    ("dram", 10), ("file", 10), ("policy", 8), ("hit %", 7), ("dram %", 7), ("file %", 7),
    ("optimum", 8), ("of it", 7), ("writes/unique", 14), ("file read", 11), ("file written", 13),
    ("promoted", 9), ("wasted", 7), ("saved PFLOP", 11), ("blocks/s", 10),
)  # fmt: skip


def _lines(result: Result, *, with_head: bool) -> Iterator[str]:
    if with_head:
        yield ""
        yield " ".join(f"{name:>{width}}" for name, width in _COLUMNS)
    setup, traffic = result.setup, result.traffic
    policies = dict.fromkeys(
        (setup.dram_policy, setup.file_policy) if setup.file_blocks else (setup.dram_policy,)
    )
    reached = result.token_hit_ratio / result.optimum if result.optimum else 1.0
    cells = (
        size(setup.dram_blocks * setup.record_nbytes),
        size(setup.file_blocks * setup.record_nbytes) if setup.file_blocks else "-",
        "/".join(policies),
        f"{100 * result.token_hit_ratio:.2f}",
        f"{100 * result.dram_hit_ratio:.2f}",
        f"{100 * result.file_hit_ratio:.2f}" if setup.file_blocks else "-",
        f"{100 * result.optimum:.2f}",
        f"{100 * reached:.1f} %",
        f"{result.writes_per_unique:.3f}" if setup.file_blocks else "-",
        size(traffic.file_reads * setup.record_nbytes) if setup.file_blocks else "-",
        size(result.written_blocks * setup.record_nbytes) if setup.file_blocks else "-",
        f"{traffic.promotions_used:,}" if setup.file_blocks else "-",
        f"{traffic.promotions_wasted:,}" if setup.file_blocks else "-",
        f"{result.saved_flops / 1e15:,.1f}" if result.saved_flops is not None else "-",
        f"{result.blocks_per_s:,.0f}",
    )
    yield " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _as_dict(workload: Workload, result: Result) -> dict[str, Any]:
    about = {"trace": workload.name, "format": workload.format, "skipped": workload.skipped}
    return result.to_dict() | about


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def _reading() -> Iterator[Callable[[int], None]]:
    """Count on stderr where somebody looks at it: how long a trace is shows when it was read."""
    if not sys.stderr.isatty():
        yield lambda requests: None
        return
    yield lambda requests: click.echo(f"\rreading {requests:,} requests", nl=False, err=True)
    click.echo("\r\033[K", nl=False, err=True)


@contextmanager
def _replaying(requests: int) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr where somebody looks at it."""
    if not sys.stderr.isatty():
        yield lambda answered: None
        return
    with click.progressbar(length=requests, label="replaying", file=sys.stderr) as bar:
        yield lambda answered: bar.update(answered - bar.pos)
    click.echo("\033[A\r\033[K", nl=False, err=True)
