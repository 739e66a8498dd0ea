"""`kvstore bench`: the benchmarks on the command line."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from kvstore_bench.chat.command import chat
from kvstore_bench.chat.options import PLOT, generator_options
from kvstore_bench.chat.reports.compare_command import compare
from kvstore_bench.chat.workloads.workload import Conversation, dump, save
from kvstore_bench.codec.command import codec
from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, MODEL, PATH, measuring, show, steps
from kvstore_bench.console.exits import explained
from kvstore_bench.fidelity.command import fidelity
from kvstore_bench.peers.command import peers


@click.group()
def bench() -> None:
    """Measure what a KV cache gains: multi-turn chat against any OpenAI-compatible server."""


bench.add_command(chat)
bench.add_command(compare)
bench.add_command(codec)
bench.add_command(fidelity)
bench.add_command(peers)


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


@bench.command(short_help="Time put, get and match of a local daemon.")
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
    model: Path | None,
    as_json: bool,
) -> None:
    """Measure put, get and match of a daemon that the benchmark starts.

    It compares put and get with a plain copy of the same bytes, and a match of 1000 keys with an
    empty RPC of the same size. Both sides alternate in one run.

    It also compares coded records (L3) with raw ones, in memory: to move, sum up and decode them,
    and to encode, move and sum them up; and tells how long the interpreter's lock is held. This
    needs torch; the KV is made up, or a model's.

    \b
    Examples:
      kvstore bench store
      kvstore bench store --json | jq .get_vs_raw
      kvstore bench store --resident-blocks 1000000 --json
      kvstore bench store --tls --json
    """

    def say(text: str) -> None:
        click.echo(text, err=True)

    needed = ("torch", "transformers") if model else ()
    with measuring(as_json, *needed, *(("cryptography",) if tls else ())):
        from kvstore_bench.store.store import StorePlan, run

        plan = StorePlan(records, record_mib << 20, rounds, resident_blocks=resident_blocks)
        if tls:
            from kvstore_bench.store.tls import run_tls

            show(run_tls(plan, say), as_json, ratio_tables.print_tls)
            return
        if arena == "sealed":
            from kvstore_bench.store.sealed import run_sealed

            show(run_sealed(plan, say), as_json, ratio_tables.print_sealed)
            return
        result = run(plan, say)
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


@bench.command(short_help="Measure a quiet tenant beside noisy ones.")
@click.option("--tenants", "count", type=click.IntRange(2, 64), default=8, show_default=True)
@click.option("--dram-mib", type=click.IntRange(256), default=2048, show_default=True)
@click.option("--record-mib", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True)
@click.option("--idle", type=click.IntRange(2, 256), default=64, show_default=True)
@PATH
@JSON
def tenants(
    *,
    count: int,
    dram_mib: int,
    record_mib: int,
    seconds: float,
    idle: int,
    path: Path,
    as_json: bool,
) -> None:
    """Measure what a tenant within its guarantee notices of others that flood the daemon.

    The quiet tenant asks for its prefixes alone, then while all others put, read and lease as fast
    as they can. Also measures what one tenant may borrow, how fast it is given back, and what idle
    tenants cost.

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
        )
        result = run(plan, path, lambda text: click.echo(text, err=True))
        show(result, as_json, ratio_tables.print_tenants)


@bench.command(short_help="Time the file tier beside fio, or a bucket.")
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
    "--depth", type=click.IntRange(1, 64), help="Requests in flight.  [default: 16; object: 4]"
)
@click.option("--encrypted", is_flag=True, help="Measure it with a root key, beside without one.")
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
    as_json: bool,
    **size: int,
) -> None:
    """Measure a slower tier beside its device.

    file: the benchmark starts a daemon. Writes are puts and a flush. Reads are cold, promoted to
    the arena, with checksums verified. fio does the same in turns: sequential, direct, the same
    block size and depth. Without fio, only the daemon is measured. With --record l3, records are
    encoded before they are put, and decoded when they are there; bytes are those before coding.

    object: a tier writes runs of 16 blocks; a new tier finds, reads and verifies them. Plain
    obstore loops do the same in turns. Then it times lookups of missing blocks.

    With --encrypted, the same tier without a root key takes the place of fio and obstore.

    \b
    Examples:
      kvstore bench tier --tier file --path /mnt/nvme0
      kvstore bench tier --tier file --encrypted --json | jq .read_vs_plain
      kvstore bench tier --tier file --record l3 --json | jq .raw_gb_s_vs_fio
      kvstore bench tier --tier object --url s3://bucket/bench
      kvstore bench tier --json | jq .read_vs_fio
    """
    given = {name: value for name, value in size.items() if value is not None}

    def say(text: str) -> None:
        click.echo(text, err=True)

    if record != "raw" and (kind == "object" or encrypted):
        raise click.UsageError("--record l3 measures the file tier alone, and not --encrypted")
    with measuring(as_json, *(("torch", "transformers") if model else ())):
        if kind == "object":
            from kvstore_bench.tiers.object_tier import ObjectPlan
            from kvstore_bench.tiers.object_tier import run as run_object

            objects = ObjectPlan(record_mib << 20, **given)
            result = run_object(objects, url, endpoint, say, encrypted=encrypted)
            print_it = ratio_tables.print_encrypted if encrypted else ratio_tables.print_object_tier
            show({"tier": kind, **result}, as_json, print_it)
            return
        from kvstore_bench.tiers.tier import TierPlan, run

        plan = TierPlan(record_mib << 20, **given)
        if encrypted:
            from kvstore_bench.tiers.encrypted import run as run_encrypted

            result = run_encrypted(plan, path, say)
            show({"tier": kind, **result}, as_json, ratio_tables.print_encrypted)
            return
        if record == "l3":
            from kvstore_bench.tiers.coded import run as run_coded

            result = run_coded(plan, model, path, say)
        else:
            result = run(plan, path, say)
        show({"tier": kind, "record": record, **result}, as_json, ratio_tables.print_tier)


@bench.command(short_help="Time recovery after SIGKILL.")
@PATH
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--encrypted", is_flag=True, help="Of a daemon with a root key.")
@JSON
def recovery(*, path: Path, blocks: int, rounds: int, encrypted: bool, as_json: bool) -> None:
    """Measure the recovery time of a daemon after SIGKILL.

    Blocks have 4 KiB, so that their number takes the time, not their bytes. Seconds count from the
    start of the process.

    \b
    Examples:
      kvstore bench recovery --path /mnt/nvme0
      kvstore bench recovery --blocks 100000 --json | jq .first_hit_s
    """
    with measuring(as_json):
        from kvstore_bench.tiers.recovery import RecoveryPlan, run

        plan = RecoveryPlan(blocks, rounds, encrypted)
        result = run(plan, path, lambda text: click.echo(text, err=True))
        show(result, as_json, ratio_tables.print_recovery)


@bench.command(short_help="Measure memory per block, and time of policies.")
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--policies", default="lru,hz", show_default=True, metavar="NAME,...")
@click.option("--daemons", is_flag=True, help="Measure full daemons instead, one per policy.")
@JSON
def index(*, blocks: int, policies: str, daemons: bool, as_json: bool) -> None:
    """Measure the daemon's memory per resident block, and the time of each policy.

    It runs the planner of this release over an arena that counts bytes but stores none: for raw
    records, then for coded ones, exact (l3) and in two parts (ep), with the share of the arena that
    is slots while blocks come and leave. With --daemons, it runs match and put on real daemons with
    blocks of 4 KiB, over gRPC.

    \b
    Examples:
      kvstore bench index
      kvstore bench index --blocks 200000 --json | jq .ep.arena_fill.hz
      kvstore bench index --daemons --json | jq .put_p50_us
    """

    def say(text: str) -> None:
        click.echo(text, err=True)

    with measuring(as_json):
        from kvstore_bench.store import index as planners
        from kvstore_bench.store import index_daemon

        plan = planners.IndexPlan(blocks, tuple(policies.split(",")))
        run = index_daemon.run if daemons else planners.run
        result = run(plan, say)
        if not daemons:
            from kvstore_bench.store import index_coded

            coded = index_coded.CodedIndexPlan(max(1000, blocks // 4))
            result |= index_coded.run(coded, plan.policies, say)
        show(result, as_json, ratio_tables.print_index)


@bench.command(short_help="Measure the scrub of the file tier.")
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


@bench.command(short_help="Time to first token of transformers, with and without.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkpoint of transformers.  [default: a random Llama of 8 layers]",
)
@click.option("--device", default="cpu", show_default=True)
@click.option("--tokens", type=click.IntRange(64), default=2000, show_default=True)
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
        loaded = load_model(model, device) if model else random_llama(device)
        with steps("prompts", asks(plan), as_json) as say:
            result = run(loaded, plan, path, say)
        show(result, as_json, ratio_tables.print_resumed)
        if plot:
            plot_resumed(result, plot)


@bench.command(short_help="Time copies between GPU memory and the daemon.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@PATH
@JSON
def gpu(*, rounds: int, path: Path, as_json: bool) -> None:
    """Measure copies between GPU memory and the daemon beside the speed of the links.

    Gather and scatter beside a device copy, copies to and from the arena beside a pinned copy, and
    time to first token of a 32k-token prompt on an 8B-shaped model with random weights.

    \b
    Examples:
      kvstore bench gpu --path /nvme
      kvstore bench gpu --json | jq .gather_vs_copy
    """
    with measuring(as_json, "torch", "transformers"):
        from kvstore_bench.gpu.gpu import GpuPlan, cuda_device, run

        device = cuda_device()
        result = run(GpuPlan(rounds=rounds), path, device, lambda text: click.echo(text, err=True))
        show(result, as_json, ratio_tables.print_gpu)
