"""`kvstore bench index --daemons`: what a policy costs those who ask a full daemon.

One daemon per policy, each full of prefixes of 64 small blocks in DRAM. Then one of the last
prefixes is matched and a new one put, which evicts as many blocks: each daemon in turn. A call's
time has everything in it that a client waits for: gRPC, the index, the policy and the copies.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

from kvstore import Client, Group, Namespace
from kvstore.model.block import PAGE_NBYTES, BlockKey
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.index import PREFIX_BLOCKS, IndexPlan, Say
from kvstore_bench.store.store import await_arena

RECORD_NBYTES = 16
EXTENT_NBYTES = 64 << 20
LAST_PREFIXES = 1000
FULL_WITHIN = 2  # times its blocks


class _Asked:
    """A full daemon and its client."""

    def __init__(self, client: Client, plan: IndexPlan) -> None:
        self._client = client
        self._plan = plan
        self._draw = random.Random(plan.seed)
        self._namespace_id = client.register(Namespace(16, (Group("all", RECORD_NBYTES),), ()))
        self._records = [bytes(RECORD_NBYTES)] * PREFIX_BLOCKS
        self._last: deque[list[BlockKey]] = deque(maxlen=LAST_PREFIXES)
        self.match_s: list[float] = []
        self.put_s: list[float] = []

    def fill(self) -> int:
        """Put prefixes until something is evicted; returns how many blocks are there."""
        prefixes = self._plan.blocks // PREFIX_BLOCKS
        for number in range(FULL_WITHIN * prefixes):
            self._put(self._new())
            if number >= prefixes and number % 256 == 0 and self._evicted():
                return int(self._client.admin.stats()["blocks"])
        raise Unavailable(f"the arena takes more than {FULL_WITHIN * self._plan.blocks:,} blocks")

    def sample(self) -> None:
        """Match one of the last prefixes, and put a new one."""
        asked, new = self._draw.choice(self._last), self._new()
        began = time.perf_counter()
        match = self._client.match(self._namespace_id, asked)
        if match.resident_blocks == PREFIX_BLOCKS:  # else it has left: a policy may prefer others
            self.match_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        self._put(new)
        self.put_s.append(time.perf_counter() - began)

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
    """Measure. Needs 4 KiB of memory for each block and policy, and the index."""
    with ExitStack() as stack:
        asked: dict[str, _Asked] = {}
        blocks = {}
        for policy in plan.policies:
            say(f"a daemon with {policy}: {plan.blocks:,} blocks")
            asked[policy] = _Asked(stack.enter_context(_client_of_own(policy, plan)), plan)
            blocks[policy] = asked[policy].fill()
        say(f"{plan.samples:,} prefixes of {PREFIX_BLOCKS} blocks, matched and put")
        for _ in range(plan.samples):
            for each in asked.values():
                each.sample()
    return {
        "resident_blocks": blocks,
        "match_p50_us": {name: 1e6 * median(each.match_s) for name, each in asked.items()},
        "put_p50_us": {name: 1e6 * median(each.put_s) for name, each in asked.items()},
        "plan": asdict(plan),
    }


@contextmanager
def _client_of_own(policy: str, plan: IndexPlan) -> Iterator[Client]:
    """Start a daemon that has room for the planned blocks, and not for many more."""
    nbytes = -(-plan.blocks * PAGE_NBYTES // EXTENT_NBYTES) * EXTENT_NBYTES
    settings = (
        f"dram.eviction_policy={policy}",
        f"dram.capacity={nbytes}",
        f"dram.extent={EXTENT_NBYTES}",
    )
    with (
        Daemon(*settings, file=False) as daemon,
        Client(daemon.start().target, name="kvstore bench index") as client,
    ):
        await_arena(client, nbytes)
        yield client
