"""`kvstore bench cluster` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

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
@PATH
@JSON
def cluster(
    *,
    record_mib: int,
    blocks: int,
    rounds: int,
    streams: int,
    seconds: float,
    path: Path,
    as_json: bool,
) -> None:
    """Measure how fast one daemon reads what another one has, and what lending costs.

    Two daemons on loopback. The borrower asks for a prefix that only the lender has, until it is
    leased and verified; iperf3 does its best in turns with it. The same is measured sealed, in
    records of 256 KiB, and from the lender's files beside plain direct reads. Also: when the first
    16 MiB of a prefix are usable, and how fast gets of the lender's own engines are meanwhile.
    Without iperf3, only the daemons are measured. --seconds is the time of a round of local gets.

    \b
    Examples:
      kvstore bench cluster --path /nvme
      kvstore bench cluster --json | jq .peer_get_vs_iperf3
    """
    with measuring(as_json, "cryptography"):
        from kvstore_bench.cluster.cluster import STEPS, run
        from kvstore_bench.cluster.plan import ClusterPlan
        from kvstore_bench.cluster.table import print_cluster

        plan = ClusterPlan(
            record_nbytes=record_mib << 20,
            blocks=blocks,
            rounds=rounds,
            streams=streams,
            seconds=seconds,
        )
        with steps("cluster", STEPS, as_json) as say:
            result = run(plan, path, say)
        show(result, as_json, print_cluster)
