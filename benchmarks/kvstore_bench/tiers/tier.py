"""`kvstore bench tier`: a slower tier against the device it lies on.

A daemon of our own keeps a small arena over a file tier; what is read is always cold, because more
was stored than the arena holds and O_DIRECT leaves nothing in the page cache. Every record is
verified on its way. fio reads and writes as much in the same directory, in turns with us, in the
way that was the fastest of many here; without fio, or where files cannot be opened with O_DIRECT,
what would be compared with it is None.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore import AsyncClient, Client, Group, Namespace
from kvstore.model.block import BlockKey, Grant, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.huge_pages import huge_memory
from kvstore_bench.lock_samples import LockSamples, LockWatch, sampled
from kvstore_bench.store.store import EXTENT_NBYTES, Timing, await_arena, chain
from kvstore_bench.tiers.direct import check_room, opened_direct, takes_direct, write_direct
from kvstore_bench.tiers.fio import INSTALL, TRIED_NBYTES, bandwidth, best_ways, has_fio

Say = Callable[[str], None]

WAIT_S = 60.0
WINDOW_BLOCKS = 32  # leased at once while a prefix is read
WINDOWS_AHEAD = 3  # on their way while another one is taken: as fio, at its best
FIRST_BLOCKS = 64
ROUNDS_MIN = 4  # what is read must have left the arena


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What to move: `rounds` prefixes of `blocks` records, each written, then read cold."""

    record_nbytes: int = 2 << 20
    blocks: int = 512
    rounds: int = 8
    depth: int = 16
    first_rounds: int = 30

    @property
    def round_nbytes(self) -> int:
        return self.blocks * self.record_nbytes

    @property
    def arena_nbytes(self) -> int:
        """Room for a round and a half: a round is gone when its turn comes again."""
        return -(-3 * self.round_nbytes // 2 // EXTENT_NBYTES) * EXTENT_NBYTES

    def settings(self, path: Path) -> list[str]:
        """Return those of a daemon that keeps its file tier at `path`."""
        return [
            f"dram.capacity={self.arena_nbytes}",
            "dram.eviction_policy=lru",  # what was not read for a round is cold
            f"dram.extent={EXTENT_NBYTES}",
            f"file.path={path}",
            f"file.capacity={2 * self.rounds * self.round_nbytes}",
            f"file.threads={self.depth}",
        ]


def summed_up(speeds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return median and range of each side's bytes/s over the rounds."""
    return {
        name: {"p50": statistics.median(each), "min": min(each), "max": max(each)}
        for name, each in speeds.items()
    }


def run(
    plan: TierPlan,
    directory: Path,
    say: Say,
    prefixes_of: Callable[[Client, TierPlan], Prefixes] | None = None,
) -> dict[str, Any]:
    """Measure the file tier in a scratch folder of `directory`, which is removed again.

    prefixes_of: what is stored; default: prefixes of raw records of random bytes.
    """
    if plan.rounds < ROUNDS_MIN or plan.blocks < FIRST_BLOCKS:
        raise Unavailable(f"{ROUNDS_MIN} rounds of {FIRST_BLOCKS} blocks are the least")
    beside_fio = _beside_fio(directory, say)
    accepted_nbytes = plan.rounds * plan.round_nbytes
    fio_nbytes = accepted_nbytes + TRIED_NBYTES if beside_fio else plan.round_nbytes
    check_room(directory, accepted_nbytes + fio_nbytes, plan.arena_nbytes)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch,
        serving(plan, Path(scratch), prefixes_of) as stage,
    ):
        result = _measure(stage, plan, Path(scratch), say, beside_fio=beside_fio)
        result["written_vs_raw"] = written_nbytes(stage.daemon.pid) / accepted_nbytes
        stage.daemon.stop()
    return result


def _beside_fio(directory: Path, say: Say) -> bool:
    """Return whether fio can be asked, and say why not."""
    if not has_fio():
        say(f"{INSTALL}; measuring without it: no ratios")
        return False
    if not takes_direct(directory):
        say(f"{directory} takes no O_DIRECT, as fio is asked to; measuring without it: no ratios")
        return False
    return True


class Stage(NamedTuple):
    """A daemon with a file tier, what is stored there, and how long locks are held meanwhile."""

    daemon: Daemon
    prefixes: Prefixes
    watch: LockWatch


@contextmanager
def serving(
    plan: TierPlan,
    scratch: Path,
    prefixes_of: Callable[[Client, TierPlan], Prefixes] | None = None,
) -> Iterator[Stage]:
    """Run a daemon that samples its interpreter's lock, with its file tier in `scratch`."""
    with Daemon(*plan.settings(scratch / "tier")) as daemon:
        paths = [daemon.directory / f"lock-{side}" for side in ("daemon", "client")]
        serve = [sys.executable, "-m", "kvstore_bench.lock_samples", str(paths[0])]
        daemon.command = lambda *arguments: [*serve, *arguments]  # type: ignore[method-assign]
        with (
            LockSamples(paths[0]) as theirs,
            LockSamples(paths[1]) as ours,
            sampled(ours),
            Client(daemon.start().target) as client,
        ):
            await_arena(client, plan.arena_nbytes)
            watch = LockWatch({"": theirs, "client_": ours})
            yield Stage(daemon, (prefixes_of or RawPrefixes)(client, plan), watch)


def timed_round(stage: Stage, kind: str, number: int) -> float:
    """Write or read one prefix. Returns bytes/s. kind: "write" or "read"."""
    prefixes, nbytes = stage.prefixes, stage.prefixes.plan.round_nbytes
    with stage.watch.during(kind, nbytes):
        started = time.perf_counter()
        (prefixes.write if kind == "write" else prefixes.read)(number)
        return nbytes / (time.perf_counter() - started)


def written_nbytes(pid: int) -> int:
    """Return what a process has written to disks, ever; 0 where its files lie in memory."""
    with open(f"/proc/{pid}/io", encoding="ascii") as file:
        fields = dict(line.split(": ") for line in file.read().splitlines())
    return int(fields["write_bytes"])


def _measure(
    stage: Stage, plan: TierPlan, scratch: Path, say: Say, *, beside_fio: bool
) -> dict[str, Any]:
    fio_files = [scratch / f"fio-{number}" for number in range(plan.rounds)]
    ways = best_ways(scratch, plan.round_nbytes, say) if beside_fio else {}
    names = ("write", "fio_write", "read", "fio_read") if beside_fio else ("write", "read")
    speeds: dict[str, list[float]] = {name: [] for name in names}

    def both(kind: str, number: int) -> None:
        def run_ours() -> None:
            speeds[kind].append(timed_round(stage, kind, number))

        def run_fio() -> None:
            speed = bandwidth(fio_files[number], kind, ways[kind], plan.round_nbytes)
            speeds[f"fio_{kind}"].append(speed)

        sides = (run_ours, run_fio) if beside_fio else (run_ours,)
        for side in sides[:: 1 if number % 2 else -1]:
            side()

    for number in range(plan.rounds):
        say(f"writing {plan.round_nbytes >> 20} MiB, {number + 1} of {plan.rounds}")
        both("write", number)
    for number in range(plan.rounds):
        say(f"reading {plan.round_nbytes >> 20} MiB, {number + 1} of {plan.rounds}")
        both("read", number)
    say(f"first block of {FIRST_BLOCKS}, {plan.first_rounds} rounds")
    if not beside_fio:
        write_direct(fio_files[0], plan.round_nbytes, plan.record_nbytes)
    first, direct = _first_blocks(stage.prefixes, plan, fio_files[0])
    bytes_per_s = summed_up(speeds)
    ratios = {
        f"{kind}_vs_fio": bytes_per_s[kind]["p50"] / bytes_per_s[f"fio_{kind}"]["p50"]
        if beside_fio
        else None
        for kind in ("read", "write")
    }
    return {
        **ratios,
        "first_block_extra_ms": 1e3 * (first.p50 - direct.p50),
        "gil_held_s_per_gb": stage.watch.held_s_per_gb(),
        "bytes_per_s": bytes_per_s,
        "seconds": {"first_block": asdict(first), "direct_read": asdict(direct)},
        "fio": {kind: way._asdict() for kind, way in ways.items()},
        "plan": asdict(plan),
    }


class Prefixes:
    """What is stored: one prefix a round."""

    def __init__(self, client: Client, plan: TierPlan, group: Group) -> None:
        """group: of the records."""
        self.client = client
        self.plan = plan
        namespace = Namespace(block_tokens=16, groups=(group,), identity=(("bench", "tier"),))
        self.namespace_id: NamespaceId = client.register(namespace)
        self._keys = [
            chain(self.namespace_id, plan.blocks, salt=number.to_bytes(4))
            for number in range(plan.rounds)
        ]

    def keys(self, number: int) -> list[BlockKey]:
        return self._keys[number]

    def write(self, number: int) -> None:
        """Store one prefix durably."""
        committed = self.put(number)
        if committed != self.plan.blocks or not self.client.admin.flush(WAIT_S):
            raise Unavailable(f"only {committed} of {self.plan.blocks} blocks were stored")

    def put(self, number: int) -> int:
        """Store one prefix; return how many blocks the daemon took."""
        raise NotImplementedError

    def read(self, number: int) -> None:
        """Bring one prefix up, some windows ahead of the one that is taken, as an engine does that
        prefetches."""
        keys = self._keys[number]
        if not self.is_cold(keys):
            raise Unavailable("what was to be read is still in the arena: take more rounds")
        starts = range(0, len(keys), WINDOW_BLOCKS)
        coming = (
            self.acquire(keys[: start + WINDOW_BLOCKS], skip_blocks=start) for start in starts
        )
        under_way = list(islice(coming, WINDOWS_AHEAD))
        for start in starts:
            grant, _ = under_way.pop(0).result()
            under_way += islice(coming, 1)
            self.take(grant, start)
            self.client.release(grant.lease_id)

    def take(self, grant: Grant, first: int) -> None:
        """Use a window that is leased, whose first block is the prefix's `first`."""

    def is_cold(self, keys: Sequence[BlockKey], skip_blocks: int = 0) -> bool:
        """Return whether the arena lacks the first of `keys`, and the tier has them all."""
        match = self.client.match(self.namespace_id, keys, skip_blocks=skip_blocks)
        return match.resident_blocks <= skip_blocks and match.hit_blocks == len(keys)

    def acquire(
        self, keys: Sequence[BlockKey], skip_blocks: int = 0
    ) -> Future[tuple[Grant, float]]:
        """Lease blocks. The future has the lease, and the seconds until it was there."""

        async def bring_up(remote: AsyncClient) -> tuple[Grant, float]:
            started = time.perf_counter()
            grant = await remote.acquire(
                self.namespace_id, keys, skip_blocks=skip_blocks, wait_s=WAIT_S
            )
            leased_s = time.perf_counter() - started
            if grant.hit_blocks != len(keys):
                raise Unavailable(f"{grant.hit_blocks} of {len(keys)} blocks came up")
            return grant, leased_s

        return self.client.submit(bring_up)


class RawPrefixes(Prefixes):
    """Records of random bytes; the daemon verifies them, and nobody copies them."""

    def __init__(self, client: Client, plan: TierPlan) -> None:
        super().__init__(client, plan, Group("all", plan.record_nbytes))
        shape = (min(plan.blocks, 64), plan.record_nbytes)
        rows = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        self._records = [memoryview(rows[index % len(rows)]) for index in range(plan.blocks)]

    def put(self, number: int) -> int:
        keys = self.keys(number)
        done = self.client.put(self.namespace_id, keys, self._records, wait_s=WAIT_S)
        return int(done.committed)


def _first_blocks(prefixes: Prefixes, plan: TierPlan, fio_file: Path) -> tuple[Timing, Timing]:
    """Time until the first block of a cold prefix is there, while all of it is being promoted."""
    firsts, directs = [], []
    draw = random.Random(0)
    with opened_direct(fio_file) as fd, huge_memory(plan.record_nbytes) as buffer:
        buffer.write(bytes(plan.record_nbytes))  # touched once, like the arena's slots
        windows = [
            (prefixes.keys(number)[: begin + FIRST_BLOCKS], begin)
            for begin in range(0, plan.blocks - FIRST_BLOCKS + 1, FIRST_BLOCKS)
            for number in range(plan.rounds)
        ]
        cold = [window for window in windows if prefixes.is_cold(*window)]
        for keys, begin in cold[: plan.first_rounds]:
            rest = prefixes.acquire(keys, begin)
            first, took_s = prefixes.acquire(keys[: begin + 1], begin).result()
            firsts.append(took_s)
            prefixes.client.release(first.lease_id, rest.result()[0].lease_id)
            offset = draw.randrange(plan.blocks) * plan.record_nbytes
            started = time.perf_counter()
            if os.preadv(fd, [buffer], offset) != plan.record_nbytes:
                raise Unavailable("a read of fio's file ended early")
            directs.append(time.perf_counter() - started)
    return Timing.of(firsts), Timing.of(directs)
