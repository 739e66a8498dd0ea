"""`kvstore bench`: the benchmarks on the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from kvstore_bench.chat.command import chat
from kvstore_bench.chat.options import PLOT, generator_options
from kvstore_bench.chat.reports.compare_command import compare
from kvstore_bench.chat.workloads.workload import Conversation, dump, save
from kvstore_bench.cluster.command import cluster
from kvstore_bench.codec.command import codec
from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, PATH, measuring, show, steps
from kvstore_bench.console.exits import explained
from kvstore_bench.events.command import events
from kvstore_bench.fidelity.command import fidelity
from kvstore_bench.gpu import GPU_STAGES
from kvstore_bench.peers.command import peers
from kvstore_bench.store.command import store
from kvstore_bench.tenants.command import tenants
from kvstore_bench.tiers.command import recovery, scrub, tier


@click.group()
def bench() -> None:
    """Measure what a KV cache gains: multi-turn chat against any OpenAI-compatible server."""


COMMANDS = (
    chat, compare, cluster, codec, events, fidelity, peers, store, tenants, tier, recovery, scrub
)  # fmt: skip
for command in COMMANDS:
    bench.add_command(command)


@bench.command("make-conversations", short_help="Write synthetic conversations to a file.")
@click.argument("output", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@generator_options
def make_conversations(output: Path, **shape: Any) -> None:
    """Write synthetic conversations to OUTPUT (`-` is stdout) in vLLM's JSON format.

    The same options give the same bytes on every machine.

    \b
    Example:
      kvstore bench make-conversations chats.json --conversations 20 --turns 5 --seed 7
    """
    from kvstore_bench.chat.inputs import workload_of

    with explained():
        found = workload_of(shape).dialogues
        conversations = [one for one in found if isinstance(one, Conversation)]
        if str(output) == "-":
            click.echo(dump(conversations), nl=False)
            return
        save(output, conversations)
    click.echo(f"{output}: {len(conversations)} conversations", err=True)


@bench.command(short_help="Measure memory per block, and time of policies.")
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--policies", default="lru,hz", show_default=True, metavar="NAME,...")
@click.option("--daemons", is_flag=True, help="Measure full daemons instead, two per policy.")
@click.option(
    "--plot",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also measure fewer blocks, from 100,000 on, and draw how it grows.",
)
@JSON
def index(*, blocks: int, policies: str, daemons: bool, target: Path | None, as_json: bool) -> None:
    """Measure the daemon's memory per resident block, and the time of each policy.

    It runs the planner of this release over an arena that counts bytes but stores none: for raw
    records, then for coded ones, exact (l3) and in two parts (ep), with the share of the arena that
    is slots while blocks come and leave. With --daemons, it runs match and put on real daemons with
    blocks of 4 KiB, over gRPC.

    \b
    Examples:
      kvstore bench index
      kvstore bench index --blocks 200000 --json | jq .ep.arena_fill.hz
      kvstore bench index --daemons --json | jq .longest_pause_ms
      kvstore bench index --blocks 10000000 --plot growth.png
    """

    def say(text: str) -> None:
        click.echo(text, err=True)

    with measuring(as_json, *(("matplotlib",) if target else ())):
        from kvstore_bench.store import index as planners
        from kvstore_bench.store import index_daemon

        plan = planners.IndexPlan(blocks, tuple(policies.split(",")))
        run = index_daemon.run if daemons else planners.run
        result = run(plan, say)
        if not daemons:
            from kvstore_bench.store import index_coded

            coded = index_coded.CodedIndexPlan(max(1000, blocks // 4))
            result |= index_coded.run(coded, plan.policies, say)
        if target:
            from kvstore_bench.store.index_series import plot_index, series

            result["series"] = series(run, plan, result, say)
            plot_index(result["series"], target)
        show(result, as_json, ratio_tables.print_index)


@bench.command(short_help="Time to first token of transformers, with and without.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkpoint of transformers.  [default: a random Llama of 8 layers; of one layer for"
    " more than 16,384 tokens]",
)
@click.option("--device", default="cpu", show_default=True)
@click.option(
    "--prompt-tokens",
    "--tokens",
    "tokens",
    type=click.IntRange(64, 131_072),
    default=2000,
    show_default=True,
    help="Tokens of each prompt.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--dram-mib", type=click.IntRange(64), default=512, show_default=True)
@PATH
@JSON
@PLOT
def transformers(
    *,
    model: Path | None,
    device: str,
    tokens: int,
    rounds: int,
    dram_mib: int,
    path: Path,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure time to first token with kvstore_transformers, beside the same model without.

    Each round: without kvstore, with an empty store, from DRAM, and from files after the daemon
    was killed with SIGKILL. All answers must be equal. It needs no GPU; the default takes half a
    minute on two cores.

    \b
    Examples:
      kvstore bench transformers --rounds 3 --plot resumed.png
      kvstore bench transformers --model /models/gemma --json | jq .ttft_dram_vs_cold
      kvstore bench transformers --prompt-tokens 131072 --rounds 1
    """
    with measuring(as_json, "torch", "transformers", plot=plot):
        from kvstore_bench.transformers.plot_resumed import plot_resumed
        from kvstore_bench.transformers.resumed import (
            ResumePlan,
            asks,
            load_model,
            random_llama,
            run,
        )

        plan = ResumePlan(prompt_tokens=tokens, rounds=rounds, dram_bytes=dram_mib << 20)
        loaded = load_model(model, device) if model else random_llama(tokens, device)
        with steps("prompts", asks(plan), as_json) as say:
            result = run(loaded, plan, path, say)
        show(result, as_json, ratio_tables.print_resumed)
        if plot:
            plot_resumed(result, plot)


@bench.command(short_help="Time copies between GPU memory and the daemon.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option(
    "--only",
    type=click.Choice(GPU_STAGES),
    multiple=True,
    help="Measure this part; may be given several times.  [default: all]",
)
@PATH
@JSON
def gpu(*, rounds: int, only: tuple[str, ...], path: Path, as_json: bool) -> None:
    """Measure copies between GPU memory and the daemon beside the speed of the links.

    Gather and scatter beside a device copy, copies to and from the arena beside a pinned copy, and
    time to first token of a 32k-token prompt on an 8B-shaped model with random weights: beside
    computing it, and with coded records beside raw ones. The last two take a daemon of 16 and 24
    GiB, and 30 GB of disk.

    \b
    Examples:
      kvstore bench gpu --path /nvme
      kvstore bench gpu --json | jq .gather_vs_copy
      kvstore bench gpu --only coding --only prefix
      kvstore bench gpu --only records --path /nvme
    """
    with measuring(as_json, "torch", "transformers"):
        from kvstore_bench.gpu.gpu import GpuPlan, cuda_device, run

        device = cuda_device()
        plan = GpuPlan(rounds=rounds)
        say = partial(click.echo, err=True)
        result = run(plan, path, device, say, only or GPU_STAGES)
        show(result, as_json, ratio_tables.print_gpu)
