"""What knowing the heads of many peers costs a daemon: memory, its event loop, every acquire.

The peers are a process that tells heads and has nothing else. Staleness is measured among real
daemons: from the end of a put on one to the first acquire on another that finds it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import AsyncClient, Client
from kvstore.decide.heads import HEAD_TOKENS
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore_bench.cluster.plan import FLEET, ClusterPlan
from kvstore_bench.tiers.tier import Say

BLOCK_TOKENS = 16
ASKED_KEYS = 1000
PREFIXES = 40  # that nobody has
WAIT_S = 5.0
BLOCK_S = 0.005  # of computing a block: engines tell
SOON_S = 60.0
SETTLE_S = 3.0  # the first answers after a snapshot
LOOK_S = 0.02
SMALL = ("dram.capacity=16MiB", "dram.extent=8MiB")
MODULE = "kvstore_bench.cluster.many_peers"


def measure_view(plan: ClusterPlan, say: Say) -> dict[str, Any]:
    """Measure one daemon that knows all heads of many peers, beside one that is alone."""
    heads = plan.peer_blocks * BLOCK_TOKENS // HEAD_TOKENS
    say(f"a daemon among {plan.peers} peers that have nothing")
    with _peers(plan.peers, 0) as (ports, _), _among(ports) as daemon:
        _await_links(daemon, plan.peers)
        time.sleep(min(SETTLE_S, plan.view_s))
        empty_nbytes = _resident(daemon.pid)
        idle = _loop_share(daemon.pid, plan.view_s)
    say(f"the same, of {heads:,} heads each")
    with (
        _peers(plan.peers, heads) as (ports, change),
        _among(ports) as daemon,
        Daemon(*SMALL, file=False) as alone,
    ):
        _await_heads(daemon, plan.peers * heads)
        time.sleep(min(SETTLE_S, plan.view_s))
        nbytes = (_resident(daemon.pid) - empty_nbytes) / (plan.peers * heads)
        added = _added(daemon, alone.start(), plan.asks)
        change(plan.changes_per_s)
        time.sleep(min(SETTLE_S, plan.view_s))
        share = _loop_share(daemon.pid, plan.view_s)
    return {
        **added,
        "view_bytes_per_head": nbytes,
        "view_cpu_share": share,
        "view_cpu_share_idle": idle,
    }


def _added(daemon: Daemon, alone: Daemon, asks: int) -> dict[str, Any]:
    """Time acquires that nobody can answer, of both daemons in turns."""
    spec = Namespace(BLOCK_TOKENS, (Group("all", 4096),), (("model", "view"),))
    prefixes = [_prefix(spec.id, number, ASKED_KEYS) for number in range(PREFIXES)]
    took: dict[str, list[float]] = {"view": [], "alone": []}
    with Client(daemon.target) as viewer, Client(alone.target) as other:
        sides = {"view": viewer, "alone": other}
        for client in sides.values():
            client.register(spec)
        for number in range(-1, max(1, asks // PREFIXES)):
            for name, client in list(sides.items())[:: -1 if number % 2 else 1]:
                seconds = client.submit(partial(_asked, namespace=spec.id, prefixes=prefixes))
                if number >= 0:
                    took[name] += seconds.result()
                else:
                    seconds.result()
    micros = {name: np.percentile(each, (50, 99)) * 1e6 for name, each in took.items()}
    p50, p99 = micros["view"] - micros["alone"]
    return {
        "acquire_added_us_p50": float(p50),
        "acquire_added_us_p99": float(p99),
        "acquire_us": {
            name: {"p50": float(each[0]), "p99": float(each[1])} for name, each in micros.items()
        },
    }


async def _asked(
    remote: AsyncClient, namespace: NamespaceId, prefixes: Sequence[Sequence[BlockKey]]
) -> list[float]:
    took = []
    for keys in prefixes:
        began = time.perf_counter()
        grant = await remote.acquire(namespace, keys, wait_s=WAIT_S, recompute_s_per_block=BLOCK_S)
        took.append(time.perf_counter() - began)
        if grant.hit_blocks:
            raise Unavailable("a prefix that nobody has was found")
    return took


def measure_staleness(plan: ClusterPlan, say: Say) -> dict[str, Any]:
    """Time from a put on one daemon until others find it, with more daemons than are asked."""
    say(f"puts among {plan.hosts} daemons, and who finds them when")
    spec = Namespace(BLOCK_TOKENS, (Group("all", 4096),), (("model", "staleness"),))
    ports = free_ports(plan.hosts)
    with ExitStack() as stack:
        daemons = [stack.enter_context(_member(port, ports)) for port in ports]
        for daemon in daemons:
            _await_links(daemon, plan.hosts - 1)
        clients = [stack.enter_context(Client(daemon.target)) for daemon in daemons]
        for client in clients:
            client.register(spec)
        threads = stack.enter_context(ThreadPoolExecutor(plan.hosts))
        drawn = random.Random(0)
        found: list[float] = []
        for number in range(plan.puts):
            way = 1 + number % (plan.hosts - 1)
            jobs = [
                threads.submit(
                    _found_after,
                    (clients[at], clients[(at + way) % plan.hosts]),
                    spec.id,
                    number * plan.hosts + at,
                    drawn.random(),
                )
                for at in range(plan.hosts)
            ]
            found += [job.result() for job in jobs]
    return {
        "staleness_s_p99": float(np.percentile(found, 99)),
        "staleness_s": {"p50": float(np.median(found)), "max": max(found), "puts": len(found)},
    }


def _found_after(
    clients: tuple[Client, Client], namespace: NamespaceId, number: int, later_s: float
) -> float:
    """Put on one, ask the other one until it finds it; return the seconds in between."""
    one, other = clients
    keys = _prefix(namespace, number, 2 * HEAD_TOKENS // BLOCK_TOKENS)
    time.sleep(later_s)
    one.put(namespace, keys, [bytes(4096)] * len(keys))
    put = time.perf_counter()
    while True:
        asked = time.perf_counter()
        grant = other.acquire(namespace, keys, wait_s=WAIT_S)
        if grant.lease_id:
            other.release(grant.lease_id)
        if grant.hit_blocks:
            return asked - put
        if asked - put > SOON_S:
            raise Unavailable(f"a put was not found within {SOON_S:.0f} s")
        time.sleep(LOOK_S)


def _prefix(namespace: NamespaceId, number: int, blocks: int) -> list[BlockKey]:
    return KeyChain(root_key(namespace), BLOCK_TOKENS).update([number] * BLOCK_TOKENS * blocks)


# ---- processes -----------------------------------------------------------------------------------


@contextmanager
def _peers(count: int, heads: int) -> Iterator[tuple[list[int], Any]]:
    """Yield the ports of peers, and what lets so many of their heads change in a second."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(count), str(heads), FLEET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin

    def change(per_s: int) -> None:
        stdin.write(f"{per_s}\n")
        stdin.flush()

    try:
        yield json.loads(process.stdout.readline() or "[]"), change
    finally:
        process.kill()
        process.wait()
        stdin.close()
        process.stdout.close()


@contextmanager
def _among(ports: Sequence[int]) -> Iterator[Daemon]:
    (own,) = free_ports(1)
    with _member(own, ports) as daemon:
        yield daemon


@contextmanager
def _member(own: int, ports: Sequence[int]) -> Iterator[Daemon]:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    settings = (
        *SMALL,
        f"cluster.fleet={FLEET}",
        "cluster.membership=static",
        f"cluster.static={json.dumps(addresses)}",
        f"cluster.listen=127.0.0.1:{own}",
    )
    with Daemon(*settings, file=False) as daemon:
        yield daemon.start()


def _await_links(daemon: Daemon, count: int) -> None:
    _await(daemon, lambda fleet: sum(each["state"] == "up" for each in fleet["members"]) >= count)


def _await_heads(daemon: Daemon, count: int) -> None:
    _await(daemon, lambda fleet: fleet["view"]["heads"] >= count)


def _await(daemon: Daemon, true: Any) -> None:
    """Raises Unavailable."""
    deadline = time.monotonic() + SOON_S
    with Client(daemon.target, arena=False) as client:
        while not true(client.admin.stats()["fleet"]):
            if time.monotonic() > deadline:
                raise Unavailable(f"the fleet did not meet:\n{daemon.output()[-500:]}")
            time.sleep(0.1)


def _resident(pid: int) -> int:
    """Return the memory of a process that is its own, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise Unavailable(f"/proc/{pid}/status has no RssAnon")


def _loop_share(pid: int, seconds: float) -> float:
    """Return the share of a core that the event loop's thread takes."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    began, before = time.perf_counter(), ticks()
    time.sleep(seconds)
    used_s = (ticks() - before) / os.sysconf("SC_CLK_TCK")
    return used_s / (time.perf_counter() - began)
