"""`kvstore bench peers` on the command line."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore_bench.chat.options import PLOT
from kvstore_bench.console.exits import EXIT_FAILED_REQUESTS, check_targets, explained, need, needs
from kvstore_bench.console.progress import progress
from kvstore_bench.peers.roster import NIXL_UCX, OURS, PEERS

if TYPE_CHECKING:
    from kvstore_bench.peers.course import Course

NAMES = [*(peer.name for peer in PEERS), NIXL_UCX]
QUICK = {"block_mib": 1, "blocks": 16, "rounds": 2}


def _python_of(ctx: Any, param: Any, values: tuple[str, ...]) -> dict[str, str]:
    """Read NAME=PATH, as the callback of an option."""
    pythons = {}
    for value in values:
        name, _, path = value.partition("=")
        found = shutil.which(path)
        if name not in NAMES or found is None:
            raise click.BadParameter(
                f"{value!r} is no NAME=PATH with a name of {', '.join(NAMES)} and a Python"
            )
        pythons[name] = found
    return pythons


@click.command(short_help="Compare kvstore with other stores.")
@click.option(
    "--system",
    "systems",
    type=click.Choice(NAMES),
    multiple=True,
    help="System to measure besides kvstore; repeatable.  [default: all]",
)
@click.option(
    "--python-of",
    "pythons",
    callback=_python_of,
    multiple=True,
    metavar="NAME=PATH",
    help="Python that has this peer installed, where it is not this one; may be repeated.",
)
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default=".",
    help="Directory on the device to measure; a scratch folder in it is used.  [default: here]",
)
@click.option("--block-mib", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option(
    "--blocks", type=click.IntRange(4), default=256, show_default=True, help="Blocks per round."
)
@click.option("--rounds", type=click.IntRange(2), default=7, show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="I/O threads of every system that has such a setting.",
)
@click.option("--remote-only", is_flag=True, help="Measure gets from another process alone.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--quick", is_flag=True, help="1 MiB, 16 blocks, 2 rounds: does it work?")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@PLOT
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def peers(
    *, plot: Path | None, remote_only: bool, as_json: bool, no_progress: bool, **given: Any
) -> None:
    """Measure kvstore beside comparable systems: put, hot get, cold get, and get after a kill.

    Every system gets the same blocks and runs in a process of its own, one at a time, in turns. The
    benchmark compares every returned byte. It skips systems that are not installed, and prints how
    to install them. Valkey and Mooncake come with kvstore-tiers[peers]. Others pin old versions or
    bring CUDA: give them an environment of their own, with numpy:

    \b
      python -m venv peers
      peers/bin/pip install lmcache numpy
      kvstore bench peers --python-of lmcache=peers/bin/python

    A put is "accepted" when the system acknowledges it, and "durable" when the system has synced it
    to the device. A get ends with the bytes in the caller's memory. A hot get repeats an earlier
    get. A cold get reads from the device; the table says how. Then the benchmark kills all
    processes (SIGKILL), drops the page cache, and gets the blocks again.

    A remote get is one from the memory of another process into this one's, over TCP on this host:
    by two daemons of this store, by Mooncake Store, and by NIXL over UCX (nixl-ucx).

    \b
    Examples:
      kvstore bench peers --path /mnt/nvme0
      kvstore bench peers --remote-only --json | jq .remote_get_vs_best
      kvstore bench peers --system valkey --block-mib 4 --json | jq .cold_get_vs_best
    """
    import msgspec

    with explained():
        need(*needs(as_json=as_json, plot=plot))
        from kvstore_bench.peers.course import Course
        from kvstore_bench.peers.show import plot_peers, print_peers
        from kvstore_bench.peers.turn import PeersPlan

        check_targets(plot)
        given |= QUICK if given["quick"] else {}
        plan = PeersPlan(
            block_nbytes=given["block_mib"] << 20,
            blocks=given["blocks"],
            rounds=given["rounds"],
            threads=given["threads"],
            seed=given["seed"],
        )
        course = Course(plan, given["path"].resolve(), given["pythons"])
        quiet = as_json or no_progress or not sys.stderr.isatty()
        wanted = {OURS, *(given["systems"] or NAMES)}
        result = _measured(course, wanted, remote_only=remote_only, quiet=quiet)
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(result), indent=1))
        else:
            print_peers(result)
        if plot and not remote_only:
            plot_peers(result, plot)
    if result["wrong"] or result["remote_wrong"]:
        sys.exit(EXIT_FAILED_REQUESTS)


def _measured(
    course: Course, wanted: set[str], *, remote_only: bool, quiet: bool
) -> dict[str, Any]:
    """Run the rounds of those that are installed, and say who is not."""
    from kvstore_bench.peers.remote.course import REMOTE_PEERS

    local = [peer for peer in PEERS if peer.name in wanted and not remote_only]
    remote = [peer for peer in REMOTE_PEERS if peer.name in wanted]
    present, absent = course.present(local)
    between, lacking = course.present(remote if len(remote) > 1 or remote_only else [])
    for name, line in (absent | lacking).items():
        click.echo(f"{name}: skipped: {line}", err=True)
    with progress("turns", course.plan.rounds * (len(present) + len(between)), quiet=quiet) as say:
        result = course.run(present, say) | {"skipped": absent}
        return result | course.remote.run(between, lacking, say)
