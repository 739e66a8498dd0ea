"""The slots of a put: nobody else's until it is over, and free again if nothing comes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.decide.planner.steps import STEP_BLOCKS
from kvstore.model.block import BlockKey, Grant, Span, padded
from kvstore.model.checksum import checksum
from kvstore.testing.disks import FaultyDisk
from tests.store.node import FULL, RECORD, SPEC, Node, chain, record_bytes

A, B = chain(1, 3 * STEP_BLOCKS), chain(2, 8)


async def reserve(node: Node, keys: Sequence[BlockKey], wait_s: float = 0.0) -> Grant:
    spans = (Span(FULL, 0, len(keys)),)
    return await node.store.puts.reserve(
        DAEMON_SESSION, SPEC.id, keys, first_block=0, parent=None, spans=spans, wait_s=wait_s
    )


def fill(node: Node, grant: Grant, keys: Sequence[BlockKey]) -> list[int]:
    """Write records into their slots; return the checksums."""
    for slot, key in zip(grant.slots, keys, strict=True):
        if slot is not None:
            node.store.view(slot)[:] = record_bytes(key, FULL)
    return [checksum(record_bytes(key, FULL)) for key in keys]


def used_nbytes(node: Node) -> int:
    return int(node.store.report.stats()["dram"]["used_bytes"])


def test_slots_that_are_released_while_they_are_committed_are_nobody_elses() -> None:
    """A commit takes several steps, and between two of them a client may release, or die."""
    with Node(None, arena_bytes=len(A) * padded(RECORD)) as node:

        async def scene() -> int:
            grant = await reserve(node, A)
            assert not grant.refused
            sums = fill(node, grant, A)
            commit = node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums)
            committing = asyncio.create_task(commit)
            await asyncio.sleep(0)
            assert not committing.done()
            assert node.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
            other = await reserve(node, B)
            fill(node, other, B)
            return (await committing).committed

        assert node.run(scene()) == len(A)
        for begin in range(0, len(A), STEP_BLOCKS):
            node.get(A, spans=(Span(FULL, begin, begin + STEP_BLOCKS),))
        assert used_nbytes(node) == len(A) * padded(RECORD)


def test_a_put_that_is_refused_until_more_is_written_holds_no_slots(tmp_path: Path) -> None:
    disk, may_write = FaultyDisk(), threading.Event()
    with Node(tmp_path / "kv", disk=disk, write_behind_bytes_max=4 * RECORD) as node:
        disk.fault = lambda _: may_write.wait(10)
        assert node.put(A, 0, 8).refused == 0
        before = used_nbytes(node)
        done = node.put(B)
        may_write.set()
        assert (done.committed, done.refused) == (0, 2 * len(B))
        assert node.metrics.refusals.labels("write_behind")._value.get() == 2 * len(B)
        assert used_nbytes(node) == before
        assert node.flush()


def test_a_reserve_that_is_cancelled_at_any_turn_holds_no_slots() -> None:
    with Node(None) as node:

        async def is_cancelled(turns: int) -> bool:
            reserving = asyncio.create_task(reserve(node, A))
            for _ in range(turns):
                await asyncio.sleep(0)
            if reserving.done():
                node.store.release(DAEMON_SESSION, [reserving.result().lease_id])
                return False
            reserving.cancel()
            await asyncio.wait([reserving])
            return reserving.cancelled()

        turns = 0
        while node.run(is_cancelled(turns)):
            assert used_nbytes(node) == 0
            turns += 1
        assert turns > len(A) // STEP_BLOCKS  # steps of finding room, and one more to grant it
        assert used_nbytes(node) == 0


def test_a_reserve_that_waits_for_more_room_holds_no_slots_meanwhile() -> None:
    with Node(None, arena_bytes=len(A) // 2 * padded(RECORD)) as node:
        grant = node.run(reserve(node, A, wait_s=0.1))
        assert grant.refused == len(A) // 2
        node.store.release(DAEMON_SESSION, [grant.lease_id])
        assert used_nbytes(node) == 0
