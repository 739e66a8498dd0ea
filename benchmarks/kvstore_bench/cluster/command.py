"""`kvstore bench cluster` on the command line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.options import PLOT
from kvstore_bench.console.commands import JSON, PATH, measuring, show, steps


@click.command(short_help="Time reads from another daemon beside iperf3.")
@click.option("--record-mib", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--blocks", type=click.IntRange(1, 1024), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True)
@click.option(
    "--streams",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Threads for peers (cluster.threads), and streams of iperf3.",
)
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True)
@click.option("--peers", type=click.IntRange(4, 1024), default=100, show_default=True)
@click.option("--peer-blocks", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--hosts", type=click.IntRange(5, 64), default=8, show_default=True)
@click.option("--vllm", is_flag=True, help="Measure two real vLLM engines instead.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a checkpoint, for --vllm.",
)
@click.option("--tokens", type=click.IntRange(64), default=2000, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=5, show_default=True)
@PATH
@JSON
@PLOT
def cluster(
    *,
    vllm: bool,
    model: Path | None,
    tokens: int,
    prompts: int,
    path: Path,
    as_json: bool,
    plot: Path | None,
    **sizes: Any,
) -> None:
    """Measure how fast one daemon reads what another one has, and what lending costs.

    Two daemons on loopback. The borrower asks for a prefix that only the lender has, until it is
    leased and verified; iperf3 does its best in turns with it. The same is measured sealed, in
    records of 256 KiB, and from the lender's files beside plain direct reads. Also: when the first
    16 MiB of a prefix are usable, and how fast gets of the lender's own engines are meanwhile.
    Then what it costs to know the heads of --peers of --peer-blocks blocks each: bytes, processor
    time, and time of an acquire that nobody can answer. And how long after a put on one of --hosts
    daemons the others find it. Without iperf3, only the daemons are measured. --seconds is the time
    of a round of local gets.

    With --vllm, two engines of --model, on two hosts: as root, in network namespaces. Time to first
    token of a prompt of --tokens that only the other host has; the same with the other host dead,
    stopped, slow, or flipping bits; prefill here and decode there, on a link of 200 Mbit/s. It
    takes some minutes, 10 GB of memory and no GPU. --plot draws that.

    \b
    Examples:
      kvstore bench cluster --path /nvme
      kvstore bench cluster --json | jq .peer_get_vs_iperf3
      kvstore bench cluster --vllm --model /models/gemma --plot cluster.png
      kvstore bench cluster --vllm --model /models/gemma --json | jq .remote_ttft_vs_cold
    """
    if vllm:
        _engines(model, tokens, prompts, path, as_json=as_json, plot=plot)
        return
    if model or plot:
        raise click.UsageError("--model and --plot go with --vllm")
    _daemons(path, as_json, **sizes)


def _daemons(path: Path, as_json: bool, *, record_mib: int, seconds: float, **sizes: int) -> None:
    with measuring(as_json, "cryptography"):
        from kvstore_bench.cluster.cluster import STEPS, run
        from kvstore_bench.cluster.plan import ClusterPlan
        from kvstore_bench.cluster.table import print_cluster

        plan = ClusterPlan(
            record_nbytes=record_mib << 20,
            seconds=seconds,
            asks=60 * sizes["peers"],
            view_s=10.0 * seconds,
            puts=sizes["rounds"],
            **sizes,
        )
        with steps("cluster", STEPS, as_json) as say:
            result = run(plan, path, say)
        show(result, as_json, print_cluster)


def _engines(
    model: Path | None, tokens: int, prompts: int, path: Path, *, as_json: bool, plot: Path | None
) -> None:
    with measuring(as_json, "torch", "vllm", "aiohttp", plot=plot):
        from kvstore_bench.cluster.table import print_engines
        from kvstore_bench.cluster.vllm_course import run
        from kvstore_bench.cluster.vllm_picture import plot_engines
        from kvstore_bench.cluster.vllm_plan import VllmPlan

        if model is None:
            raise InvalidRequest("--vllm takes --model, the folder of a checkpoint")
        plan = VllmPlan(model.resolve(), prompt_tokens=tokens, prompts=prompts)
        with (
            tempfile.TemporaryDirectory(prefix="kv-cluster-", dir=path) as logs,
            steps("cluster", plan.steps, as_json) as say,
        ):
            result = run(plan, Path(logs), say)
        if plot:
            plot_engines(result, plot)
        show(result, as_json, print_engines)
