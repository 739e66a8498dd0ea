"""`kvstore bench scrub`: does the background check find rot, and does it cost the readers anything?

Bits are flipped in the segments of a daemon that is down; started again, it has to find every one
by itself. Then one directory is read again and again, by a daemon that scrubs it all the time and
by one that does not, in turns: two directories would not do, a disk has fast and slow places.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.tier.file import Audit
from kvstore_bench.store.store import await_arena
from kvstore_bench.tiers.tier import RawPrefixes, TierPlan, summed_up

Say = Callable[[str], None]

FIND_S_MAX = 600.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """What to store, how many bits to flip, and how fast to scrub beside the readers, who read all
    of it `passes` times on each side."""

    tier: TierPlan = TierPlan(blocks=128, rounds=8)  # noqa: RUF009 - frozen
    passes: int = 6
    flips: int = 20
    nbytes_per_s: int = 8 << 20
    seed: int = 0


def run(plan: ScrubPlan, directory: Path, say: Say) -> dict[str, Any]:
    """Measure in a scratch folder of `directory`, which is removed again."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch:
        found, seconds = _find(plan, Path(scratch) / "rotten", say)
        bytes_per_s = summed_up(_read_beside(plan, Path(scratch) / "read", say))
    return {
        "flips_found": found,
        "flips": plan.flips,
        "found_s": seconds,
        "read_ratio_while_scrubbing": bytes_per_s["scrubbing"]["p50"] / bytes_per_s["quiet"]["p50"],
        "bytes_per_s": bytes_per_s,
        "plan": asdict(plan),
    }


def _find(plan: ScrubPlan, path: Path, say: Say) -> tuple[int, float]:
    """Return how many flipped bits were found, and how long that took."""
    with Daemon(*plan.tier.settings(path), "file.scrub=0") as daemon:
        say(f"storing {plan.tier.rounds * plan.tier.round_nbytes >> 20} MiB")
        with Client(daemon.start().target) as client:
            await_arena(client, plan.tier.arena_nbytes)
            prefixes = RawPrefixes(client, plan.tier)
            for number in range(plan.tier.rounds):
                prefixes.write(number)
        daemon.stop()
        _flip(plan, path)
        say(f"{plan.flips} bits flipped; scrubbing at full speed")
        started = time.perf_counter()
        daemon.start("file.scrub=100GiB", "file.scrub_every_s=0.5")
        found = 0
        with Client(daemon.target) as client:
            while found < plan.flips and time.perf_counter() - started < FIND_S_MAX:
                time.sleep(POLL_S)
                found = client.admin.stats()["totals"].get("corrupt_blocks", {}).get("scrub", 0)
        daemon.stop()
    return int(found), time.perf_counter() - started


def _flip(plan: ScrubPlan, path: Path) -> None:
    """Flip one bit in each of `flips` records."""
    places = [
        (file, offset + start, block.stored_nbytes)
        for file, offset, header in Audit(path).runs
        for start, block in zip(header.offsets, header.blocks, strict=True)
    ]
    draw = random.Random(plan.seed)
    if len(places) < plan.flips:
        raise Unavailable(f"only {len(places)} records for {plan.flips} flips")
    for file, start, nbytes in draw.sample(places, plan.flips):
        with file.open("r+b") as target:
            target.seek(start + draw.randrange(nbytes))
            byte = target.read(1)[0]
            target.seek(-1, 1)
            target.write(bytes([byte ^ 1 << draw.randrange(8)]))


def _read_beside(plan: ScrubPlan, path: Path, say: Say) -> dict[str, list[float]]:
    """Return the speeds of cold reads of one directory, with and without a scrub beside them."""
    sides = {
        "scrubbing": (f"file.scrub={plan.nbytes_per_s}", "file.scrub_every_s=0.5"),
        "quiet": ("file.scrub=0",),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    with Daemon(*plan.tier.settings(path)) as daemon:
        _read(plan, daemon, sides["quiet"], write=True)
        for number in range(plan.passes):
            say(f"reading, {number + 1} of {plan.passes}")
            for name in list(sides)[:: 1 if number % 2 else -1]:
                speeds[name] += _read(plan, daemon, sides[name])
    return speeds


def _read(
    plan: ScrubPlan, daemon: Daemon, settings: tuple[str, ...], *, write: bool = False
) -> list[float]:
    """Start the daemon, read every prefix, stop it. Returns bytes/s; first `write` what is read."""
    speeds = []
    with Client(daemon.start(*settings).target) as client:
        await_arena(client, plan.tier.arena_nbytes)
        prefixes = RawPrefixes(client, plan.tier)
        for number in range(plan.tier.rounds):
            if write:
                prefixes.write(number)
        for number in range(plan.tier.rounds):
            started = time.perf_counter()
            prefixes.read(number)
            speeds.append(plan.tier.round_nbytes / (time.perf_counter() - started))
    daemon.stop()
    return speeds
