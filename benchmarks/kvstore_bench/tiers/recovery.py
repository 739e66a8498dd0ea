"""`kvstore bench recovery`: how long after a kill a daemon serves what it had stored.

Many small blocks, the worst case: what takes time is indexing them, not reading their bytes. The
daemon is killed with SIGKILL, so the newest segment has no footer and is read page by page. The
first hit is that of blocks from the middle of what is stored; all are there when all are indexed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore import Client
from kvstore.model.block import PAGE_NBYTES, BlockKey, Group, Namespace
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore_bench.store.store import chain

Say = Callable[[str], None]

BATCH_KEYS = 4096
PREFIX_BLOCKS = 64
WAIT_S = 60.0
START_S_MAX = 300.0
POLL_S = 0.005
COUNT_S = 0.1  # to count the blocks more often would hold the daemon up


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """How many blocks of 4 KiB to store, and how often to kill the daemon.

    encrypted: its file tier is, with a root key in memory.
    """

    blocks: int = 1_000_000
    rounds: int = 3
    encrypted: bool = False


def run(plan: RecoveryPlan, directory: Path, say: Say) -> dict[str, Any]:
    """Measure in a scratch folder of `directory`, which is removed again."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch,
        root_key_in_memory() as root_key,
        Daemon(
            f"file.path={Path(scratch) / 'file'}",
            f"file.capacity={4 * plan.blocks * PAGE_NBYTES}",
            "file.segment=256MiB",
            "file.scrub=0",
            "dram.capacity=256MiB",
            f"security.root_key_file={root_key if plan.encrypted else ''}",
        ) as daemon,
    ):
        namespace = Namespace(16, (Group("all", PAGE_NBYTES),), (("bench", "recovery"),))
        keys = chain(namespace.id, plan.blocks)
        say(f"storing {plan.blocks:,} blocks")
        with Client(daemon.start().target) as client:
            _fill(client, namespace, keys)
        rounds = []
        for number in range(plan.rounds):
            say(f"SIGKILL and restart, {number + 1} of {plan.rounds}")
            daemon.kill()
            rounds.append(_restart(daemon, namespace, keys))
        daemon.stop()
    return {
        **{name: statistics.median(each[name] for each in rounds) for name in rounds[0]},
        "rounds": rounds,
        "plan": asdict(plan),
    }


def _fill(client: Client, namespace: Namespace, keys: list[BlockKey]) -> None:
    namespace_id = client.register(namespace)
    record = bytes(PAGE_NBYTES)
    for start in range(0, len(keys), BATCH_KEYS):
        some = keys[start : start + BATCH_KEYS]
        parent = keys[start - 1] if start else None
        done = client.put(
            namespace_id,
            some,
            [record] * len(some),
            first_block=start,
            parent=parent,
            wait_s=WAIT_S,
        )
        if done.refused:
            raise Unavailable(f"{done.refused} blocks found no room")
    if not client.admin.flush(WAIT_S):
        raise Unavailable("what was stored is not durable after a minute")


def _restart(daemon: Daemon, namespace: Namespace, keys: list[BlockKey]) -> dict[str, float]:
    """Return the seconds from starting the process to its first hit, and to knowing all."""
    started = time.perf_counter()
    daemon.start()  # a client that comes too early would wait for its breaker to close
    first_hit_s = 0.0
    middle = len(keys) // 2  # neither what is indexed first in the background nor what is last
    asked = keys[middle : middle + PREFIX_BLOCKS]
    with Client(daemon.target, timeout_s=5.0) as client:
        while time.perf_counter() - started < START_S_MAX:
            try:
                if not first_hit_s:
                    hit = client.match(client.register(namespace), asked).hit_blocks
                    first_hit_s = time.perf_counter() - started if hit == len(asked) else 0.0
                if client.admin.stats()["blocks"] == len(keys):
                    return {
                        "first_hit_s": first_hit_s,
                        "complete_s": time.perf_counter() - started,
                    }
            except KVStoreError:
                pass  # not there yet
            time.sleep(COUNT_S if first_hit_s else POLL_S)
    raise Unavailable(f"the daemon does not have its blocks back after {START_S_MAX:.0f} s")
