"""A lowered cap: all that may leave is evicted at once, and goes back to the system as threads
manage."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.outcome import Reason
from kvstore.store import caps
from kvstore.tier.dram import holes
from tests.store.node import Node, chain

KIB = 1 << 10


def test_eviction_does_not_wait_for_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    real = holes.punch

    def held_up(*args: object) -> None:
        assert go_on.wait(60)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(holes, "punch", held_up)
    monkeypatch.setattr(caps, "SHED_STEP_NBYTES", 64 * KIB)
    with Node(tmp_path / "kv", arena_bytes=2048 * KIB) as node:
        leased = chain(100, 4)
        node.put(leased, 0, 4, durable=True)
        for name in range(4):
            node.put(chain(name), 0, 24, durable=True)
        lease = node.acquire(leased)
        before = node.planner.stored.resident

        node.arena.growth.set_capacity(512 * KIB)
        node.store.caps._resized.set()
        node.until(lambda: not node.arena.holes.excess_nbytes)
        assert 4 <= node.planner.stored.resident < before // 2
        assert node.arena.reserved_nbytes == 2048 * KIB  # nothing is given back yet
        assert node.arena.allocate(512 * KIB) is None  # and nothing of it is handed out
        go_on.set()

        node.until(lambda: node.arena.reserved_nbytes <= 512 * KIB)
        assert node.store.release(DAEMON_SESSION, [lease.lease_id]) == [True]
        assert node.get(leased) == 4
        for name in range(4):
            assert node.get(chain(name)) == 24


def test_what_leaves_the_file_tier_for_other_tenants_says_so(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=1024 * KIB) as node:
        for name in range(12):
            node.put(chain(name), 0, 24, durable=True)
        used = node.store.caps.file_used
        left = node.planner.counts.left
        node.store.caps.set_file(used // 2)
        node.until(lambda: node.store.caps.file_used <= used // 2)
        given = left["file", Reason.OVER_SHARE]
        assert given > 0
        assert left["file", Reason.EVICTED] == 0

        node.write_behind.caps.set(used // 4, 0)  # as settings do
        node.until(lambda: node.store.caps.file_used <= used // 4)
        assert left["file", Reason.EVICTED] > 0
        assert left["file", Reason.OVER_SHARE] == given


def test_what_nobody_may_evict_is_not_looked_for_at_each_change_of_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tenants' caps move all the time; a walk over what leases hold takes a while."""
    with Node(tmp_path / "kv", arena_bytes=2048 * KIB) as node:
        names = [chain(name) for name in range(4)]
        for name in names:
            node.put(name, 0, 24, durable=True)
        leases = [node.acquire(name) for name in names]
        shed, sheds = node.planner.eviction.shed, 0

        def counted(nbytes: int) -> int:
            nonlocal sheds
            sheds += 1
            return shed(nbytes)

        monkeypatch.setattr(node.planner.eviction, "shed", counted)
        node.arena.growth.set_capacity(256 * KIB)
        for _ in range(200):
            node.store.caps._resized.set()
            node.run(asyncio.sleep(0.001))
        assert 1 <= sheds <= 20  # one each 0.1 s, beside those that evicted something
        for lease in leases:
            node.store.release(DAEMON_SESSION, [lease.lease_id])
        node.until(lambda: node.arena.reserved_nbytes <= 256 * KIB)
