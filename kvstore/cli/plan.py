"""`kvstore plan`: what to buy."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvstore.cli.demand import demand_of, demand_options
from kvstore.cli.kind import check_finite
from kvstore.cli.model import model_options, ratio_options
from kvstore.decide.policy import policy_by_name
from kvstore.model.block import RECORD_NBYTES_MAX
from kvstore.model.errors import ConfigError
from kvstore.model.words import rounded, size
from kvstore.plan import (
    Budgeted,
    Drive,
    ModelKV,
    Needs,
    Prices,
    Sizing,
    Target,
    load_model,
    needs_of,
    within_endurance,
)
from kvstore.plan import size_tiers as find_sizes
from kvstore.replay import Workload, load_workload, workload_of
from kvstore.replay.synth import BLOCK_TOKENS, Demand, synthesize_trace
from kvstore.settings import parse_size

MODEL_FLOPS_SHARE = 0.4  # of a GPU's peak that prefill reaches


@click.command()
@model_options
@ratio_options
@click.option("--tp", type=click.IntRange(1, 1024), default=1, help="Tensor-parallel ranks.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Recorded traffic, as `kvstore replay` takes it; without it the traffic is synthetic.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Requests to count. Before synthetic ones, as many more warm the tiers.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of synthetic traffic.")
@demand_options
@click.option(
    "--scale", type=click.FloatRange(0.001), default=1.0, help="Multiply the traffic by this."
)
@click.option(
    "--hits",
    type=click.FloatRange(0.01, 1.0),
    default=0.95,
    show_default=True,
    help="Share of an infinite cache's hits to reach.",
)
@click.option(
    "--dram-hits",
    type=click.FloatRange(0.0, 1.0),
    default=0.5,
    show_default=True,
    help="Share of these hits that dram serves.",
)
@click.option("--policy", default="lru", show_default=True, help="Eviction policy of both tiers.")
@click.option("--prefill", type=click.FloatRange(1.0), help="Tokens/s that the engine prefills.")
@click.option(
    "--tflops",
    type=click.FloatRange(1.0),
    help=f"Peak TFLOPS of one GPU; prefill is assumed to reach {MODEL_FLOPS_SHARE:.0%} of it.",
)
@click.option(
    "--drive", default="7TiB", show_default=True, metavar="SIZE", help="Size of one NVMe drive."
)
@click.option(
    "--dwpd", default=1.0, show_default=True, help="Drive writes per day within its endurance."
)
@click.option("--drive-read", default="6GiB", show_default=True, metavar="SIZE", help="Per second.")
@click.option(
    "--drive-write", default="3GiB", show_default=True, metavar="SIZE", help="Per second."
)
@click.option(
    "--prices",
    metavar="DRAM,DRIVE,GPU",
    help="Prices of a GiB of dram per month, a drive per month, and a GPU per hour.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(*, as_json: bool, **options: Any) -> None:
    """Size each tier, the drives and the bandwidth for a load, and price a hit.

    It replays traffic, recorded or synthetic (see `kvstore trace synth`), through the planner and
    policies of the daemon, some 20 times. With the default --requests that takes minutes; a
    terminal shows how far it is. Loading is faster than prefill where the bandwidth is above the
    break-even: KV bytes per token x prefilled tokens/s.

    Endurance may take more drives than capacity and bandwidth do. Then a second list has settings
    that keep fewer drives within their endurance, and the hits that this costs.

    \b
    Examples:
      kvstore plan --model /models/Llama-3.1-8B --rate 20 --prefill 9000
      kvstore plan --model config.json --tp 8 --tflops 989 --kind agent --scale 50 --ratio 1.38
      kvstore plan --model config.json --trace monday.jsonl.gz --hits 0.9 --prices 3,80,2.5
    """
    check_finite(options)
    names = {item.name for item in fields(_Asked)}
    asked = _Asked(**{name: value for name, value in options.items() if name in names})
    demand = {name: value for name, value in options.items() if name not in names}
    if asked.model is None:
        raise click.UsageError("--model: a config.json, or a model's folder")
    given = [name for name, value in demand.items() if value is not None]
    if asked.trace is not None and (given or asked.rate is not None):
        raise click.UsageError("--trace has its own turns, gaps and rate: use --scale")
    policy_by_name(asked.policy)
    bought, paid, scale = _drive(asked), _prices(asked.prices), asked.scale
    kv = load_model(asked.model, kv_dtype=asked.kv_dtype, tp=asked.tp)
    workload = _traffic(asked, demand)
    prompts = [request.tokens for request in workload.counted]
    per_token = kv.mean_bytes_per_token(prompts) / asked.ratio
    in_files = per_token * asked.ratio / (asked.file_ratio or asked.ratio)
    target = _target(asked, workload.block_tokens, per_token, in_files)
    pace = asked.prefill or _pace(kv, asked.tflops, sum(prompts) / len(prompts))
    needs_for = partial(
        needs_of,
        drive=bought,
        bytes_per_token=in_files,
        prefill_tokens_per_s=pace,
        scale=scale,
        prices=paid,
        gpus=kv.tp,
    )
    with _replaying() as progress:
        how: dict[str, Any] = {"prefill_flops": kv.prefill_flops, "progress": progress}
        sizing = find_sizes(workload, target, **how)
        needs = needs_for(sizing)
        budgeted = within_endurance(workload, sizing, needs, bought, scale=scale, **how)
    saved = needs_for(budgeted.sizing, drives_min=budgeted.drives) if budgeted is not None else None
    if as_json:
        found = _as_dict(kv, per_token, pace, sizing, needs)
        click.echo(json.dumps(found | {"within_endurance": _budget_as_dict(budgeted, saved)}))
        return
    click.echo("\n".join(itertools.chain(_about(kv), _found(workload, sizing, scale))))
    click.echo("\n".join(_bought(needs, pace)))
    if budgeted is not None and saved is not None:
        click.echo("\n".join(_saved(budgeted, saved, needs, sizing)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options that are not about made-up demand: named as on the command line."""

    model: Path | None
    kv_dtype: str
    ratio: float
    file_ratio: float | None
    tp: int
    trace: Path | None
    requests: int
    seed: int
    kind: str
    rate: float | None
    scale: float
    hits: float
    dram_hits: float
    policy: str
    prefill: float | None
    tflops: float | None
    drive: str
    dwpd: float
    drive_read: str
    drive_write: str
    prices: str | None


def _drive(asked: _Asked) -> Drive:
    drive = Drive(
        nbytes=parse_size(asked.drive),
        dwpd=asked.dwpd,
        read=parse_size(asked.drive_read),
        write=parse_size(asked.drive_write),
    )
    if min(drive.nbytes, drive.dwpd, drive.read, drive.write) <= 0:
        raise ConfigError("--drive, --dwpd, --drive-read and --drive-write must be above 0")
    return drive


def _target(asked: _Asked, block_tokens: int, per_token: float, in_files: float) -> Target:
    """per_token, in_files: bytes of a token in dram and in the file tier. Raises ConfigError."""
    nbytes = round(per_token * block_tokens)
    if not 1 <= nbytes <= RECORD_NBYTES_MAX:
        raise ConfigError(f"a block would have {nbytes:,} bytes")
    return Target(
        hits=asked.hits,
        dram_hits=asked.dram_hits,
        policy=asked.policy,
        record_nbytes=nbytes,
        file_record_nbytes=max(1, round(in_files * block_tokens)),
    )


def _traffic(asked: _Asked, demand: dict[str, Any]) -> Workload:
    """Return recorded or synthetic traffic."""
    with _doing("reading the traffic" if asked.trace else "synthesizing the traffic"):
        if asked.trace is not None:
            return load_workload(asked.trace, requests_max=asked.requests, seed=asked.seed)
        made = demand_of(asked.kind, asked.rate, demand)
        return _made_up(asked.kind, made, asked.requests, asked.seed)


def _made_up(kind: str, demand: Demand, requests: int, seed: int) -> Workload:
    """Return made-up requests, after as many that only warm the tiers up: into cold ones, sessions
    under way would write their whole history again."""

    asked = synthesize_trace(demand, requests=requests, seed=seed, warmup=requests)
    rows = (each.to_row() for each in asked)
    name = f"synthetic: {kind}"
    return workload_of(rows, name=name, block_tokens=BLOCK_TOKENS, warmup=requests)


def _prices(text: str | None) -> Prices | None:
    if text is None:
        return None
    try:
        dram, drive, gpu = (float(each) for each in text.split(","))
    except ValueError:
        raise click.UsageError(f"--prices {text}: write three numbers: 3,80,2.5") from None
    if not all(0 <= each < float("inf") for each in (dram, drive, gpu)):
        raise click.UsageError(f"--prices {text}: prices are from 0")
    return Prices(dram_gib_month=dram, drive_month=drive, gpu_hour=gpu)


def _pace(kv: ModelKV, tflops: float | None, prompt: float) -> float | None:
    """Return the tokens/s of prefill on GPUs with so many TFLOPs each."""
    if tflops is None:
        return None
    return tflops * 1e12 * kv.tp * MODEL_FLOPS_SHARE * prompt / kv.prefill_flops(prompt)


def _as_dict(
    kv: ModelKV, per_token: float, pace: float | None, sizing: Sizing, needs: Needs
) -> dict[str, Any]:
    model = {
        "name": kv.name,
        "attention": kv.attention,
        "kv_dtype": kv.kv_dtype,
        "bytes_per_token": kv.bytes_per_token,
        "rank_bytes_per_token": kv.rank_bytes_per_token,
        "full_bytes_per_token": kv.full_bytes_per_token,
        "mean_bytes_per_token": per_token,
        "windows": kv.windows,
        "state_layers": kv.state_layers,
        "active_weights": kv.active_weights,
    }
    replayed = sizing.result.to_dict() | {"seconds": sizing.seconds}
    return {"model": model, "prefill": pace, "replay": replayed, "needs": asdict(needs)}


def _budget_as_dict(budgeted: Budgeted | None, needs: Needs | None) -> dict[str, Any] | None:
    if budgeted is None or needs is None:
        return None
    return {
        "drives": budgeted.drives,
        "settings": {
            "file.write_per_day": budgeted.write_bytes_per_day,
            "file.admission": budgeted.admission,
        },
        "replay": budgeted.sizing.result.to_dict() | {"seconds": budgeted.sizing.seconds},
        "needs": asdict(needs),
    }


def _about(kv: ModelKV) -> Iterator[str]:
    ranks = f", {size(kv.rank_bytes_per_token)} on each of {kv.tp} ranks" if kv.tp > 1 else ""
    yield (
        f"{kv.name}: {kv.attention.upper()}, {kv.layer_count} layers, KV in {kv.kv_dtype}:"
        f" {size(kv.bytes_per_token)} per token{ranks}"
    )
    if kv.windows:
        windows = ", ".join(f"{each:,}" for each in kv.windows)
        yield (
            f"  layers with a window of {windows} tokens keep no more of a prompt: a long one grows"
            f" by {size(kv.full_bytes_per_token)} per token"
        )
    if kv.state_layers:
        yield f"  {kv.state_layers} layers keep a state instead of KV, which is not stored"


def _found(workload: Workload, sizing: Sizing, scale: float) -> Iterator[str]:
    result = sizing.result
    times = f", {rounded(scale)} times" if scale != 1 else ""
    rate = len(workload.counted) / sizing.seconds * scale
    yield (
        f"{workload.name}{times}: {rounded(rate)} requests/s,"
        f" {result.tokens / result.requests:,.0f} tokens each; an infinite cache hits"
        f" {100 * result.infinite:.1f} %"
    )
    yield (
        f"  hit: {100 * result.token_hit_ratio:.1f} % of the tokens,"
        f" {100 * result.dram_hit_ratio:.1f} % from dram, {100 * result.file_hit_ratio:.1f} % from"
        " files"
    )


def _bought(needs: Needs, pace: float | None) -> Iterator[str]:
    yield f"dram           {size(needs.dram_bytes)}"
    yield f"file tier      {size(needs.file_bytes)}"
    drives = ", ".join(f"{reason} {count}" for reason, count in needs.drives.items())
    yield f"drives         {max(needs.drives.values())} ({drives}), if every block is written"
    yield (
        f"written        {size(needs.writes_per_day)} a day, {size(needs.peak_write)}/s in the"
        " busiest minute"
    )
    yield f"read           {size(needs.mean_read)}/s, {size(needs.peak_read)}/s at most"
    if needs.break_even is None:
        yield "break-even     needs --prefill or --tflops"
    else:
        gbit = needs.break_even * 8 / 1e9
        yield (
            f"break-even     {size(needs.break_even)}/s of NVMe, {rounded(gbit)} Gbit/s of NIC, for"
            f" one engine that prefills {pace:,.0f} tokens/s: below, recomputing is faster"
        )
    if needs.cost_per_hit is not None and needs.cost_per_million_tokens is not None:
        yield (
            f"cost           {rounded(needs.cost_per_hit)} a hit,"
            f" {rounded(needs.cost_per_million_tokens)} a million hit tokens"
        )
    if needs.recompute_per_million_tokens is not None:
        yield f"recomputing    {rounded(needs.recompute_per_million_tokens)} a million tokens"


def _saved(budgeted: Budgeted, saved: Needs, needs: Needs, sizing: Sizing) -> Iterator[str]:
    """Say what fewer drives can do, and with which settings."""
    hits, all_hits = budgeted.sizing.result.token_hit_ratio, sizing.result.token_hit_ratio
    yield ""
    yield (
        f"with a write budget: {budgeted.drives} instead of {max(needs.drives.values())} drives;"
        f" {size(saved.writes_per_day)} written a day"
    )
    yield (
        f"  hit: {100 * hits:.1f} % of the tokens instead of {100 * all_hits:.1f} %,"
        f" {100 * budgeted.sizing.result.dram_hit_ratio:.1f} % from dram"
    )
    paid = saved.cost_per_million_tokens
    if saved.cost_per_hit is not None and paid is not None:
        yield f"  cost: {rounded(saved.cost_per_hit)} a hit, {rounded(paid)} a million hit tokens"
    yield (
        f"  kvstore serve --set file.write_per_day={_to_type(budgeted.write_bytes_per_day)}"
        f" --set file.admission={budgeted.admission}"
    )
    if budgeted.drives > 1:
        share = _to_type(budgeted.write_bytes_per_day // budgeted.drives)
        yield f"  is for one daemon with all drives: several take {share} for each drive they have"


def _to_type(nbytes: int) -> str:
    """Return a size as settings take it, no larger than it is."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if nbytes >> bits >= 10:
            return f"{nbytes >> bits}{unit}"
    return str(nbytes)


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Say on stderr what takes a while, where somebody looks at it."""
    if sys.stderr.isatty():
        click.echo(f"{what} ...", nl=False, err=True)
    yield
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)


@contextmanager
def _replaying() -> Iterator[Callable[[], None]]:
    """Count replays on stderr where somebody looks at it."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    numbers = itertools.count(1)
    yield lambda: click.echo(f"\rreplay {next(numbers)} of about 20", nl=False, err=True)
    click.echo("\r\033[K", nl=False, err=True)
