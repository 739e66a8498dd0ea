"""`kvstore bench index --daemons`: what a block costs a full daemon, and those who ask it.

One daemon per policy, each full of prefixes of 64 small blocks in DRAM, and beside it one with a
tenth of them. Then one of the last prefixes is matched and a new one put, which evicts as many
blocks: each daemon in turn. A call's time has everything in it that a client waits for: gRPC, the
index, the policy and the copies. Memory is what the daemon has grown by, without its arena. Last,
prefixes are matched and put while others ask for statistics, scan, register and flush; then
everything is cleared. The longest pause of the daemon's event loop is noted in each of these.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvstore import AsyncClient, Client, Group, Namespace
from kvstore.model.block import PAGE_NBYTES, BlockKey
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.heartbeat import BEAT_S, Heartbeat
from kvstore_bench.store.index import PREFIX_BLOCKS, SHARE, IndexPlan, Say, named
from kvstore_bench.store.store import await_arena

RECORD_NBYTES = 16
EXTENT_NBYTES = 64 << 20
SMALL_EXTENT_NBYTES = 2 << 20  # of an arena smaller than SMALL_NBYTES, which is not rounded so far
SMALL_NBYTES = 1 << 30
LAST_PREFIXES = 1000
FULL_WITHIN = 2  # times its blocks
LOOK_EVERY = 32  # prefixes
BEATS = 5  # so many later, a beat that was late is known
REPEATS = 20  # of calls that are over at once
CALL_S = 120.0


class _Asked:
    """A full daemon and its client."""

    def __init__(
        self, daemon: Daemon, client: Client, heartbeat: Heartbeat, plan: IndexPlan, blocks: int
    ) -> None:
        """blocks: it has room for, and not for many more."""
        self._daemon = daemon
        self._client = client
        self._heartbeat = heartbeat
        self._blocks = blocks
        self._draw = random.Random(plan.seed)
        self._namespace_id = client.register(_namespace())
        self._records = [bytes(RECORD_NBYTES)] * PREFIX_BLOCKS
        self._last: deque[list[BlockKey]] = deque(maxlen=LAST_PREFIXES)
        self.resident_blocks = 0
        self.bytes_per_block = 0.0
        self.match_s: list[float] = []
        self.put_s: list[float] = []
        self.pause_ms: dict[str, float] = {}
        heartbeat.reset()

    def fill(self) -> None:
        """Put prefixes until something is evicted."""
        prefixes, before = self._blocks // PREFIX_BLOCKS, _anonymous_nbytes(self._daemon.pid)
        for number in range(FULL_WITHIN * prefixes + LOOK_EVERY):
            self._put(self._new())
            if number >= prefixes and number % LOOK_EVERY == 0 and self._evicted():
                break
        else:
            raise Unavailable(f"the arena takes more than {FULL_WITHIN * self._blocks:,} blocks")
        self.note("fill")
        self.resident_blocks = int(self._client.admin.stats()["blocks"])
        grown = _anonymous_nbytes(self._daemon.pid) - before
        self.bytes_per_block = grown / self.resident_blocks

    def sample(self) -> None:
        """Match one of the last prefixes, and put a new one."""
        self._ask_and_put(self.match_s, self.put_s)

    def others(self) -> None:
        """Match and put while somebody else asks for what concerns all blocks; then clear."""
        self.forget()
        admin = self._client.admin
        numbers = range(1, REPEATS + 1)
        self._beside("stats", lambda: [admin.stats() for _ in range(REPEATS)])
        self._beside("scan", lambda: self._client.submit(_scanned).result(CALL_S * REPEATS))
        self._beside("register", lambda: [self._client.register(_namespace(n)) for n in numbers])
        self._beside("flush", lambda: [admin.flush() for _ in range(REPEATS)])
        admin.clear()
        self.note("clear")

    def forget(self) -> None:
        """Begin anew to look for the longest pause."""
        self._heartbeat.reset()

    def note(self, what: str) -> None:
        """Note the longest pause of the daemon's loop since the last note, by what it did."""
        time.sleep(BEATS * BEAT_S)
        self.pause_ms[what] = 1e3 * self._heartbeat.longest_s
        self._heartbeat.reset()

    def _beside(self, what: str, call: Callable[[], Any]) -> None:
        errors: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as error:
                errors.append(error)

        calling = threading.Thread(target=run, name=f"kvstore-bench-{what}", daemon=True)
        calling.start()
        while calling.is_alive():
            self._ask_and_put([], [])
        self.note(what)
        if errors:
            raise Unavailable(f"{what}: {errors[0]}") from errors[0]

    def _ask_and_put(self, match_s: list[float], put_s: list[float]) -> None:
        asked, new = self._draw.choice(self._last), self._new()
        began = time.perf_counter()
        match = self._client.match(self._namespace_id, asked)
        if match.resident_blocks == PREFIX_BLOCKS:  # else it has left: a policy may prefer others
            match_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        self._put(new)
        put_s.append(time.perf_counter() - began)

    def _new(self) -> list[BlockKey]:
        keys = [BlockKey(self._draw.randbytes(32)) for _ in range(PREFIX_BLOCKS)]
        self._last.append(keys)
        return keys

    def _put(self, keys: Sequence[BlockKey]) -> None:
        done = self._client.put(self._namespace_id, keys, self._records)
        if done.committed != len(keys):
            raise Unavailable(f"the daemon took {done.committed} of {len(keys)} blocks")

    def _evicted(self) -> bool:
        return bool(self._client.admin.stats()["dram"]["evicted_blocks"])


def run(plan: IndexPlan, say: Say) -> dict[str, Any]:
    """Measure. Needs 4.4 KiB of memory for each block and policy, and the index."""
    with ExitStack() as stack:
        asked: dict[str, _Asked] = {}
        tenths: dict[str, _Asked] = {}
        for policy in plan.policies:
            for sides, blocks in ((asked, plan.blocks), (tenths, _tenth(plan))):
                say(f"a daemon with {policy}: {blocks:,} blocks")
                sides[policy] = stack.enter_context(_asked(policy, plan, blocks))
                sides[policy].fill()
        say(f"{plan.samples:,} prefixes of {PREFIX_BLOCKS} blocks, matched and put")
        for each in asked.values():
            each.forget()  # what its loop did while the others were started
        for _ in range(plan.samples):
            for each in (*asked.values(), *tenths.values()):
                each.sample()
        for each in asked.values():
            each.note("sample")
        for policy, each in asked.items():
            say(f"statistics, scan, register, flush and clear of the daemon with {policy}")
            each.others()
    matches = {name: median(each.match_s) for name, each in asked.items()}
    growth = {name: matches[name] / median(tenth.match_s) for name, tenth in tenths.items()}
    p99 = {name: 1e3 * quantiles(each.match_s, n=100)[98] for name, each in asked.items()}
    return {
        **{f"bytes_per_block_{name}": each.bytes_per_block for name, each in asked.items()},
        **named(plan.blocks, max(growth.values()), max(p99.values())),
        "longest_pause_ms": max(max(each.pause_ms.values()) for each in asked.values()),
        "resident_blocks": {name: each.resident_blocks for name, each in asked.items()},
        "bytes_per_block": {name: each.bytes_per_block for name, each in asked.items()},
        "match_p50_us": {name: 1e6 * each for name, each in matches.items()},
        "match_p99_ms": p99,
        "match_p50_vs_tenth": growth,
        "put_p50_us": {name: 1e6 * median(each.put_s) for name, each in asked.items()},
        "pause_ms": {name: max(each.pause_ms.values()) for name, each in asked.items()},
        "pauses_ms": {name: each.pause_ms for name, each in asked.items()},
        "plan": asdict(plan),
    }


def _tenth(plan: IndexPlan) -> int:
    return max(2 * PREFIX_BLOCKS, plan.blocks // SHARE)


def _namespace(number: int = 0) -> Namespace:
    return Namespace(16, (Group("all", RECORD_NBYTES),), (("number", str(number)),))


async def _scanned(client: AsyncClient) -> int:
    items: AsyncIterator[Any] = client.admin.scan()
    return sum([1 async for _ in items])


def _anonymous_nbytes(pid: int) -> int:
    """Return a process's own memory: an arena is shared."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@contextmanager
def _asked(policy: str, plan: IndexPlan, blocks: int) -> Iterator[_Asked]:
    """Start a daemon that has room for so many blocks, and not for many more."""
    wanted = blocks * PAGE_NBYTES
    extent = EXTENT_NBYTES if wanted >= SMALL_NBYTES else SMALL_EXTENT_NBYTES
    nbytes = -(-wanted // extent) * extent
    settings = (
        f"dram.eviction_policy={policy}",
        f"dram.capacity={nbytes}",
        f"dram.extent={extent}",
    )
    with Daemon(*settings, file=False) as daemon:
        path = daemon.directory / "heartbeat"
        serve = [sys.executable, "-m", "kvstore_bench.store.heartbeat", str(path)]
        daemon.command = lambda *arguments: [*serve, *arguments]  # type: ignore[method-assign]
        with (
            Heartbeat(path) as heartbeat,
            Client(daemon.start().target, name="kvstore bench index", timeout_s=CALL_S) as client,
        ):
            await_arena(client, nbytes)
            yield _Asked(daemon, client, heartbeat, plan, blocks)
