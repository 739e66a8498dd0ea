"""`kvstore bench store` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from kvstore.client.copying import COPY_THREADS_MAX
from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, MODEL, measuring, show, thread_counts


@click.command(short_help="Time put, get and match of a local daemon.")
@click.option("--records", type=click.IntRange(2), default=64, show_default=True)
@click.option("--record-mib", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(5), default=30, show_default=True)
@click.option(
    "--resident-blocks",
    type=click.IntRange(0),
    default=0,
    help="Also time matches beside so many stored blocks of 4 KiB and a busy writer.",
)
@click.option(
    "--coded-mib",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="KV that is coded and moved, more than caches hold. 0: none.",
)
@click.option("--tls", is_flag=True, help="Measure TCP instead: TLS with a token beside plaintext.")
@click.option(
    "--arena",
    type=click.Choice(["direct", "sealed"]),
    default="direct",
    show_default=True,
    help="sealed: time put and get of a sealed arena beside a direct one, and nothing else.",
)
@click.option(
    "--tenants",
    type=click.IntRange(1, 64),
    help="Time a tenant among so many beside a daemon without tenants, and nothing else.",
)
@click.option(
    "--threads",
    default="",
    help="Copy by so many threads of a client, such as 1,2,4, beside plain copies by as many.",
)
@MODEL
@JSON
def store(
    *,
    records: int,
    record_mib: int,
    rounds: int,
    resident_blocks: int,
    coded_mib: int,
    tls: bool,
    arena: str,
    tenants: int | None,
    threads: str,
    model: Path | None,
    as_json: bool,
) -> None:
    """Measure put, get and match of a daemon that the benchmark starts.

    It compares put and get with a plain copy of the same bytes by as many threads, and a match of
    1000 keys with an empty RPC of the same size. Both sides alternate in one run.

    It also compares coded records (L3) with raw ones, in memory: to move, sum up and decode them,
    and to encode, move and sum them up. This needs torch; the KV is made up, or a model's.

    \b
    Examples:
      kvstore bench store
      kvstore bench store --json | jq .get_vs_raw
      kvstore bench store --resident-blocks 1000000 --json
      kvstore bench store --threads 1,2,4,8 --json | jq .threads
      kvstore bench store --tls --json
      kvstore bench store --tenants 16 --json | jq .match_vs_alone
    """

    say = partial(click.echo, err=True)
    needed = ("torch", "transformers") if model else ()
    with measuring(as_json, *needed, *(("cryptography",) if tls else ())):
        from kvstore_bench.store import threads as scaling
        from kvstore_bench.store.store import StorePlan, run

        counts = thread_counts(threads, COPY_THREADS_MAX)
        plan = StorePlan(records, record_mib << 20, rounds, resident_blocks=resident_blocks)
        if tls:
            from kvstore_bench.store.tls import run_tls

            show(run_tls(plan, say), as_json, ratio_tables.print_tls)
            return
        if arena == "sealed":
            from kvstore_bench.store.sealed import run_sealed

            show(run_sealed(plan, say), as_json, ratio_tables.print_sealed)
            return
        if tenants:
            from kvstore_bench.store.among import run_among

            show(run_among(plan, tenants, say), as_json, ratio_tables.print_among)
            return
        result = run(plan, say) | scaling.run(plan, counts, say)
        if coded_mib:
            result |= _coded(coded_mib << 20, rounds, model, say)
        show(result, as_json, ratio_tables.print_store)


def _coded(
    nbytes: int, rounds: int, model: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure coded records, if what that needs is here."""
    if find_spec("torch") is None:
        say("torch is not installed: coded records are not measured")
        return dict.fromkeys(("get_vs_raw", "put_vs_raw", "lock_held_share"))
    from kvstore_bench.store.coded import CodedPlan, run

    return run(CodedPlan(nbytes, rounds), model, say)
