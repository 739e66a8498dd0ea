"""`kvstore bench tier --encrypted`: the file tier with a root key beside the same without one.

Two daemons on one disk take turns. Each writes the same records and reads them cold. CPU seconds
are those of the daemon's process: threads that encrypt, copy and wait for the disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore_bench.store.store import await_arena
from kvstore_bench.tiers.tier import FIRST_BLOCKS, ROUNDS_MIN, RawPrefixes, TierPlan, summed_up

Say = Callable[[str], None]

PLAIN, ENCRYPTED = "plain", "encrypted"
GIB = 1 << 30


def run(plan: TierPlan, directory: Path, say: Say) -> dict[str, Any]:
    """Measure in a scratch folder of `directory`, which is removed again."""
    if plan.rounds < ROUNDS_MIN or plan.blocks < FIRST_BLOCKS:
        raise Unavailable(f"{ROUNDS_MIN} rounds of {FIRST_BLOCKS} blocks are the least")
    with ExitStack() as stack:
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory)
        )
        root_key = stack.enter_context(root_key_in_memory())
        sides = {}
        for name, more in {
            PLAIN: [],
            ENCRYPTED: [f"security.root_key_file={root_key}"],
        }.items():
            settings = plan.settings(Path(scratch) / name)
            daemon = stack.enter_context(Daemon(*settings, *more))
            client = stack.enter_context(Client(daemon.start().target))
            await_arena(client, plan.arena_nbytes)
            sides[name] = _Side(RawPrefixes(client, plan), daemon.pid)
        return _measure(sides, plan, say)


class _Side:
    """One of the two daemons."""

    def __init__(self, prefixes: RawPrefixes, pid: int) -> None:
        self.prefixes = prefixes
        self._pid = pid
        self.speeds: dict[str, list[float]] = {"write": [], "read": []}
        self.cpu_s_per_gib: dict[str, list[float]] = {"write": [], "read": []}

    def go(self, kind: str, number: int) -> None:
        """Move one round and note how fast, and at what cost."""
        move = self.prefixes.write if kind == "write" else self.prefixes.read
        nbytes = self.prefixes.plan.round_nbytes
        began, cpu_s = time.perf_counter(), _cpu_s(self._pid)
        move(number)
        self.speeds[kind].append(nbytes / (time.perf_counter() - began))
        self.cpu_s_per_gib[kind].append((_cpu_s(self._pid) - cpu_s) / (nbytes / GIB))


def _measure(sides: dict[str, _Side], plan: TierPlan, say: Say) -> dict[str, Any]:
    for kind in ("write", "read"):
        for number in range(plan.rounds):
            say(f"{kind}: {plan.round_nbytes >> 20} MiB each, {number + 1} of {plan.rounds}")
            for name in (PLAIN, ENCRYPTED)[:: 1 if number % 2 else -1]:
                sides[name].go(kind, number)
    speeds = {f"{name}_{kind}": each for name in sides for kind, each in sides[name].speeds.items()}
    cpu = {
        f"{name}_{kind}": statistics.median(each)
        for name in sides
        for kind, each in sides[name].cpu_s_per_gib.items()
    }
    # A round each, one after the other: what the disk does meanwhile concerns both alike.
    ratios = {
        f"{kind}_vs_plain": statistics.median(
            ours / theirs
            for ours, theirs in zip(
                sides[ENCRYPTED].speeds[kind], sides[PLAIN].speeds[kind], strict=True
            )
        )
        for kind in ("read", "write")
    }
    more = {kind: cpu[f"{ENCRYPTED}_{kind}"] - cpu[f"{PLAIN}_{kind}"] for kind in ("read", "write")}
    return {
        **ratios,
        "cpu_s_per_gib_more": max(more.values()),
        "cpu_s_per_gib": cpu,
        "bytes_per_s": summed_up(speeds),
        "plan": asdict(plan),
    }


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken, in user and kernel mode."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
