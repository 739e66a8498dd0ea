"""`kvstore bench tenants` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, PATH, measuring, show


@click.command(short_help="Measure a quiet tenant beside noisy ones.")
@click.option("--tenants", "count", type=click.IntRange(2, 64), default=8, show_default=True)
@click.option("--dram-mib", type=click.IntRange(256), default=2048, show_default=True)
@click.option("--record-mib", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True)
@click.option("--idle", type=click.IntRange(2, 256), default=64, show_default=True)
@click.option("--durable", type=click.IntRange(2, 64), default=32, show_default=True)
@PATH
@JSON
def tenants(
    *,
    count: int,
    dram_mib: int,
    record_mib: int,
    seconds: float,
    idle: int,
    durable: int,
    path: Path,
    as_json: bool,
) -> None:
    """Measure what a tenant within its guarantee notices of others that flood the daemon.

    The quiet tenant asks for its prefixes alone, then while all others put, read and lease as fast
    as they can. To tell what any process would notice, it also asks while as many processes copy
    memory of their own. Also measures what one tenant may borrow, how fast it is given back,
    durable commits of many tenants at once beside those of one, and what idle tenants cost.

    \b
    Example:
      kvstore bench tenants --json | jq .hit_ratio_vs_alone
    """
    with measuring(as_json):
        from kvstore_bench.tenants.tenants import TenantsPlan, run

        plan = TenantsPlan(
            tenants=count,
            dram_nbytes=dram_mib << 20,
            record_nbytes=record_mib << 20,
            seconds=seconds,
            idle_tenants=idle,
            idle_seconds=seconds,
            durable_tenants=durable,
        )
        result = run(plan, path, lambda text: click.echo(text, err=True))
        show(result, as_json, ratio_tables.print_tenants)
