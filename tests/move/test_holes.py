"""A record that a client turned into zeros reaches no disk as data, whenever that happens."""

from __future__ import annotations

import errno
from pathlib import Path

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.testing.holes import allow_holes, punch
from tests.store.node import Node, chain

A = chain(1)


def settle(node: Node) -> None:
    """Wait until the arena has touched its pages: that would fill the holes again."""

    async def grown() -> None:
        growing = node.arena.growth._task
        assert growing is not None
        await growing

    node.run(grown())


def punch_arena(node: Node) -> None:
    for extent in node.arena.extents.handles():
        allow_holes(extent.fd)
        punch(extent.fd, 0, extent.nbytes)


def test_what_waits_to_be_written_is_dropped_not_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path / "kv", disk=disk) as node:
        settle(node)
        node.put(A, 0, 2, durable=True)
        disk.fault = failing("pwritev", errno.EIO)
        node.put(A, 2)
        assert not node.flush()
        punch_arena(node)
        disk.fault = lambda _: None
        node.flush()
        assert node.metrics.totals()["corrupt_blocks"]["write_behind"] > 0
        assert node.planner.index.by_key(A[2]) is None
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 2, "every byte of a hit is compared"


def test_what_was_verified_and_is_being_written_is_looked_at_again(tmp_path: Path) -> None:
    """The hole comes between the last look at the bytes and the write."""
    disk = FaultyDisk()
    with Node(tmp_path / "kv", disk=disk) as node:
        settle(node)
        node.put(A, 0, 2, durable=True)

        def punch_before_write(call: str) -> None:
            if call == "pwritev":
                punch_arena(node)

        disk.fault = punch_before_write
        node.put(A, 2, durable=True)
        node.flush()
        disk.fault = lambda _: None
        node.run(node.store._holes.look())
        assert node.planner.index.by_key(A[2]) is None
        assert node.get(A) == 2


def test_what_is_durable_comes_up_again(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        settle(node)
        node.put(A, durable=True)
        punch_arena(node)
        node.run(node.store._holes.look())
        assert node.store.report.stats()["dram"]["blocks"] == 0
        assert node.metrics.totals()["punched_bytes"] == node.arena.capacity_bytes
        assert node.get(A) == len(A)
        assert not node.arena.holes.punched()


def test_a_reader_that_holds_the_slot_keeps_it_until_it_is_done() -> None:
    with Node(None) as node:
        settle(node)
        node.put(A)
        grant = node.acquire(A)
        taken = node.arena.physical_nbytes
        punch_arena(node)
        node.run(node.store._holes.look())
        assert node.store.report.stats()["dram"]["blocks"] == 0
        assert node.arena.physical_nbytes > 0
        assert node.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
        assert node.arena.physical_nbytes == 0 < taken
