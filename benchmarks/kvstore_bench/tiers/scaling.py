"""How writes and reads of the file tier scale with the daemon's threads of that tier.

Each number has a daemon and files of its own. Over a RAM disk no device is in the way: what remains
is copies, checksums and the interpreter's lock, which bound a host with any number of drives.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore_bench.tiers.tier import Say, TierPlan, serving, summed_up, timed_round


def run(plan: TierPlan, threads: Sequence[int], directory: Path, say: Say) -> dict[str, Any]:
    """Measure with each number of threads, in a scratch folder of `directory`, which is removed
    again. Returns by number: gb_per_s of reads and writes, medians, and gil_held_s_per_gb."""
    rows = {}
    for count in sorted(set(threads)):
        say(f"{count} threads, {plan.rounds} rounds of {plan.round_nbytes >> 20} MiB")
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch:
            rows[str(count)] = _measure(replace(plan, depth=count), Path(scratch))
    return rows


def _measure(plan: TierPlan, scratch: Path) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"read": [], "write": []}
    with serving(plan, scratch) as stage:
        for kind in ("write", "read"):
            for number in range(plan.rounds):
                speeds[kind].append(timed_round(stage, kind, number))
        stage.daemon.stop()
        held = stage.watch.held_s_per_gb()
    return {
        "gb_per_s": {name: each["p50"] / 1e9 for name, each in summed_up(speeds).items()},
        "gil_held_s_per_gb": held,
    }
