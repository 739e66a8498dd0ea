"""`kvstore bench recovery`: how long after a kill a daemon serves what it had stored.

Many small blocks, the worst case: what takes time is indexing them, not reading their bytes. The
daemon is killed with SIGKILL, so the newest segment has no footer and is read page by page. The
first hit is that of blocks from the middle of what is stored; all are there when all are indexed.
Of several tenants, each stores an equal part, and the one that hits last counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
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
DRAM_NBYTES = 256 << 20
TENANT_DRAM_NBYTES = 32 << 20  # a batch has half of it
COUNT_S = 0.1  # to count the blocks more often would hold the daemon up


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """How many blocks of 4 KiB to store, and how often to kill the daemon.

    encrypted: its file tier is, with a root key in memory. tenants: who store them, an equal part
    each; 0: a daemon without tenants.
    """

    blocks: int = 1_000_000
    rounds: int = 3
    encrypted: bool = False
    tenants: int = 0

    @property
    def names(self) -> list[str]:
        return [f"t{number}" for number in range(self.tenants)]

    @property
    def blocks_each(self) -> int:
        """How many blocks one tenant stores, or the only user."""
        return self.blocks // max(1, self.tenants)

    @property
    def settings(self) -> list[str]:
        """The settings of the daemon beside its directory and its root key."""
        file_nbytes = 4 * self.blocks_each * PAGE_NBYTES
        share = DRAM_NBYTES // max(1, self.tenants) // PAGE_NBYTES * PAGE_NBYTES
        dram_nbytes = max(share, TENANT_DRAM_NBYTES)
        settings = [
            f"file.capacity={file_nbytes * max(1, self.tenants)}",
            "file.segment=256MiB",
            "file.scrub=0",
            f"dram.capacity={dram_nbytes * max(1, self.tenants)}",
        ]
        for name in self.names:
            settings += [
                f"tenants.{name}.dram.guaranteed={dram_nbytes}",
                f"tenants.{name}.file.guaranteed={file_nbytes}",
            ]
        return settings

    def targets(self, daemon: Daemon) -> list[str]:
        """The address of each tenant, or of the only user."""
        if not self.tenants:
            return [daemon.target]
        return [f"unix:{daemon.socket.parent / name / 'kvstore.sock'}" for name in self.names]


def run(plan: RecoveryPlan, directory: Path, say: Say) -> dict[str, Any]:
    """Measure in a scratch folder of `directory`, which is removed again."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch,
        root_key_in_memory() as root_key,
        Daemon(
            f"file.path={Path(scratch) / 'file'}",
            *plan.settings,
            f"security.root_key_file={root_key if plan.encrypted else ''}",
        ) as daemon,
    ):
        namespace = Namespace(16, (Group("all", PAGE_NBYTES),), (("bench", "recovery"),))
        keys = chain(namespace.id, plan.blocks_each)
        daemon.start()
        for number, target in enumerate(plan.targets(daemon)):
            by = f" as tenant {number + 1} of {plan.tenants}" if plan.tenants else ""
            say(f"storing {len(keys):,} blocks{by}")
            with Client(target) as client:
                _fill(client, namespace, keys)
        rounds = []
        for number in range(plan.rounds):
            say(f"SIGKILL and restart, {number + 1} of {plan.rounds}")
            daemon.kill()
            rounds.append(_restart(daemon, plan, namespace, keys))
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


def _restart(
    daemon: Daemon, plan: RecoveryPlan, namespace: Namespace, keys: list[BlockKey]
) -> dict[str, float]:
    """Return the seconds from starting the process until it serves, until everybody has hit, and
    until it knows all."""
    started = time.perf_counter()
    daemon.start()  # a client that comes too early would wait for its breaker to close
    serving_s = time.perf_counter() - started
    middle = len(keys) // 2  # neither what is indexed first in the background nor what is last
    asked = keys[middle : middle + PREFIX_BLOCKS]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Client(target, timeout_s=5.0, arena=False))
            for target in plan.targets(daemon)
        ]

        def hits(client: Client) -> bool:
            return client.match(client.register(namespace), asked).hit_blocks == len(asked)

        def knows_all(client: Client) -> bool:
            return bool(client.admin.stats()["blocks"] == len(keys))

        for client in clients:
            _await(lambda client=client: hits(client), started, POLL_S)  # type: ignore[misc]
        first_hit_s = time.perf_counter() - started
        for client in clients:
            _await(lambda client=client: knows_all(client), started, COUNT_S)  # type: ignore[misc]
    return {
        "first_hit_s": first_hit_s,
        "complete_s": time.perf_counter() - started,
        "serving_s": serving_s,
    }


def _await(true: Callable[[], bool], started: float, poll_s: float) -> None:
    """Ask until it is true. Raises Unavailable if it takes too long since `started`."""
    while time.perf_counter() - started < START_S_MAX:
        try:
            if true():
                return
        except KVStoreError:
            pass  # not there yet
        time.sleep(poll_s)
    raise Unavailable(f"the daemon does not have its blocks back after {START_S_MAX:.0f} s")
