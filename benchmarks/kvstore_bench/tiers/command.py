"""`kvstore bench tier`, `recovery` and `scrub` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import (
    JSON,
    MODEL,
    PATH,
    cleaning_up,
    measuring,
    show,
    thread_counts,
)

if TYPE_CHECKING:
    from kvstore_bench.tiers.tier import TierPlan

DEPTH_MAX = 64


@click.command(short_help="Time the file tier beside fio, or a bucket.")
@click.option(
    "--tier", "kind", type=click.Choice(["file", "object"]), default="file", show_default=True
)
@click.option(
    "--record",
    type=click.Choice(["raw", "l3"]),
    default="raw",
    show_default=True,
    help="File tier: random bytes, or coded KV.",
)
@MODEL
@PATH
@click.option("--url", default="", help="Object tier: bucket.  [default: a SeaweedFS started here]")
@click.option("--endpoint", default="", help="Object tier: URL of an S3-compatible store.")
@click.option("--record-mib", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--blocks", type=click.IntRange(16), help="Blocks per round.  [default: 512; object: 96]"
)
@click.option("--rounds", type=click.IntRange(1), help="[default: 8; object: 15]")
@click.option(
    "--depth",
    type=click.IntRange(1, DEPTH_MAX),
    help="Requests in flight.  [default: 16; object: 4]",
)
@click.option("--encrypted", is_flag=True, help="Measure it with a root key, beside without one.")
@click.option(
    "--threads",
    default="",
    help="File tier: also measure it with so many threads (file.threads), such as 1,2,4.",
)
@JSON
def tier(
    *,
    kind: str,
    record: str,
    model: Path | None,
    path: Path,
    url: str,
    endpoint: str,
    record_mib: int,
    encrypted: bool,
    threads: str,
    as_json: bool,
    **size: int,
) -> None:
    """Measure a slower tier beside its device.

    file: the benchmark starts a daemon. Writes are puts and a flush. Reads are cold, promoted to
    the arena, with checksums verified. fio does the same in turns: sequential, direct, with the
    engine, block size, jobs and depth that a short search found to be the fastest here. Without
    fio, only the daemon is measured. With --record l3, records are encoded before they are put,
    and decoded when they are there; bytes are those before coding.

    It prints how many seconds the daemon holds its interpreter's lock for a GB that is written or
    read: one process moves at most a GB in that time, whatever drives it has. A directory in
    memory, such as /dev/shm, shows that bound without the drives. Files and arena must fit into
    memory there: fewer --blocks and --rounds take less.

    object: a tier writes runs of 16 blocks; a new tier finds, reads and verifies them. Plain
    obstore loops do the same in turns. Then it times lookups of missing blocks.

    With --encrypted, the same tier without a root key takes the place of fio and obstore.

    \b
    Examples:
      kvstore bench tier --tier file --path /mnt/nvme0
      kvstore bench tier --path /dev/shm --blocks 128 --threads 1,2,4
      kvstore bench tier --path /dev/shm --blocks 128 --json | jq .gil_held_s_per_gb
      kvstore bench tier --tier file --encrypted --json | jq .read_vs_plain
      kvstore bench tier --tier file --record l3 --json | jq .raw_gb_s_vs_fio
      kvstore bench tier --tier object --url s3://bucket/bench
      kvstore bench tier --json | jq .read_vs_fio
    """
    given = {name: value for name, value in size.items() if value is not None}
    counts = thread_counts(threads, DEPTH_MAX)
    _check_together(record, counts, file_alone=kind == "file" and not encrypted)
    with measuring(as_json, *(("torch", "transformers") if model else ())), cleaning_up():
        if kind == "object":
            from kvstore_bench.tiers.object_tier import ObjectPlan, run

            objects = ObjectPlan(record_mib << 20, **given)
            result = run(objects, url, endpoint, _say, encrypted=encrypted)
            print_it = ratio_tables.print_encrypted if encrypted else ratio_tables.print_object_tier
            show({"tier": kind, **result}, as_json, print_it)
            return
        from kvstore_bench.tiers.tier import TierPlan

        plan = TierPlan(record_mib << 20, **given)
        result = _file_tier(plan, record, model, path, counts, encrypted=encrypted)
        print_it = ratio_tables.print_encrypted if encrypted else ratio_tables.print_tier
        show({"tier": kind, **result}, as_json, print_it)


def _check_together(record: str, threads: Sequence[int], *, file_alone: bool) -> None:
    """Refuse options that do not go together. Raises UsageError."""
    if record != "raw" and not file_alone:
        raise click.UsageError("--record l3 measures the file tier alone, and not --encrypted")
    if threads and (record != "raw" or not file_alone):
        raise click.UsageError("--threads measures raw records of the file tier, not --encrypted")


def _file_tier(
    plan: TierPlan,
    record: str,
    model: Path | None,
    path: Path,
    threads: Sequence[int],
    *,
    encrypted: bool,
) -> dict[str, Any]:
    """Measure the file tier: encrypted beside plain, or beside fio."""
    if encrypted:
        from kvstore_bench.tiers.encrypted import run as run_encrypted

        return run_encrypted(plan, path, _say)
    if record == "l3":
        from kvstore_bench.tiers.coded import run as run_coded

        return {"record": record, **run_coded(plan, model, path, _say)}
    from kvstore_bench.tiers import scaling
    from kvstore_bench.tiers.tier import run

    result = {"record": record, **run(plan, path, _say)}
    if threads:
        result["threads"] = scaling.run(plan, threads, path, _say)
    return result


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command(short_help="Time recovery after SIGKILL.")
@PATH
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--encrypted", is_flag=True, help="Of a daemon with a root key.")
@click.option("--tenants", type=click.IntRange(1, 64), help="Each stores an equal part.")
@JSON
def recovery(
    *, path: Path, blocks: int, rounds: int, encrypted: bool, tenants: int | None, as_json: bool
) -> None:
    """Measure the recovery time of a daemon after SIGKILL.

    Blocks have 4 KiB, so that their number takes the time, not their bytes. Seconds count from the
    start of the process. The first hit is that of the tenant who hits last.

    \b
    Examples:
      kvstore bench recovery --path /mnt/nvme0
      kvstore bench recovery --blocks 100000 --json | jq .first_hit_s
      kvstore bench recovery --encrypted --tenants 8 --json | jq .complete_s
    """
    with measuring(as_json):
        from kvstore_bench.tiers.recovery import RecoveryPlan, run

        plan = RecoveryPlan(blocks, rounds, encrypted, tenants or 0)
        result = run(plan, path, lambda text: click.echo(text, err=True))
        show(result, as_json, ratio_tables.print_recovery)


@click.command(short_help="Measure the scrub of the file tier.")
@PATH
@click.option("--flips", type=click.IntRange(1), default=20, show_default=True)
@click.option(
    "--rate-mib",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="MiB/s of scrub while the tier is read.",
)
@JSON
def scrub(*, path: Path, flips: int, rate_mib: int, as_json: bool) -> None:
    """Measure the scrub of the file tier: the damage it finds, and its cost to readers.

    It flips bits in stored records, and the daemon must find all of them. Then cold reads from a
    daemon that scrubs alternate with cold reads from one that does not.

    \b
    Examples:
      kvstore bench scrub --path /mnt/nvme0
      kvstore bench scrub --json | jq .read_ratio_while_scrubbing
    """
    with measuring(as_json):
        from kvstore_bench.tiers.scrub import ScrubPlan, run

        plan = ScrubPlan(flips=flips, nbytes_per_s=rate_mib << 20)
        result = run(plan, path, lambda text: click.echo(text, err=True))
        show(result, as_json, ratio_tables.print_scrub)
