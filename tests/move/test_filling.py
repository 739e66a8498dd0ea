"""Leases of slots that the disk still reads into."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION, needed_spans
from kvstore.model.block import Grant, Span
from kvstore.model.checksum import checksum
from kvstore.model.outcome import Ready
from kvstore.testing.disks import FaultyDisk
from tests.store.node import FULL, SPEC, WINDOW, Node, chain, record_bytes

A = chain(1)
FIRST_BLOCKS = 4  # that are not held back
NOWHERE = 1 << 60
HELD_S = 10.0  # that a read is held back at most; then it fails, which ends a wait, too
LOST_S = 3.0


class HeldDisk(FaultyDisk):
    """A disk that holds reads back from an offset on, until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.held_from = NOWHERE
        self.error: OSError | None = None
        self.lies = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= self.held_from:
            assert self.gate.wait(HELD_S)
            if self.error is not None:
                raise self.error
        done = super().preadv(fd, buffers, offset)
        if self.lies:
            buffers[0][0] ^= 1
        return done


@pytest.fixture(autouse=True)
def small_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.move.promote.EARLY_NBYTES_MIN", 0)
    monkeypatch.setattr("kvstore.tier.file.frames.SMALL_READ_NBYTES", 0)  # these share threads


@pytest.fixture
def disk() -> Iterator[HeldDisk]:
    disk = HeldDisk()
    yield disk
    disk.gate.set()


@pytest.fixture
def node(tmp_path: Path, disk: HeldDisk) -> Iterator[Node]:
    """A node that has a prefix on disk alone, and knows how long such loads take."""
    with Node(tmp_path / "kv") as before:
        before.put(A, durable=True)
    with Node(tmp_path / "kv", disk=disk) as node:
        node.recall()
        one_read_a_record(node)
        disk.held_from = offset_of(node, FIRST_BLOCKS)
        node.store.gets._promotion.pace.note(nbytes_of(node), 0.01)
        yield node
        disk.gate.set()


def one_read_a_record(node: Node) -> None:
    node.planner.reads._read_nbytes_max = 1


def offset_of(node: Node, block: int) -> int:
    """Return where a record lies in its file."""
    (record,) = node.planner.find(SPEC.id, A, (Span(FULL, block, block + 1),))
    assert record is not None
    assert record.frame is not None
    file = node.store.gets._promotion._reads.raw_file(record.frame)
    assert file is not None
    return file.offsets[record.position]


def nbytes_of(node: Node) -> int:
    found = node.planner.find(SPEC.id, A, needed_spans(SPEC, len(A), 0))
    return sum(record.nbytes for record in found if record is not None)


async def acquire(node: Node, **options) -> Grant:
    return await node.store.gets.acquire(
        DAEMON_SESSION, SPEC.id, A, wait_s=20.0, early=True, **options
    )


def right(node: Node, grant: Grant, blocks: int) -> bool:
    """Whether the slots of the first blocks hold what was put."""
    at = 0
    for part, begin, end in grant.spans:
        for block in range(begin, end):
            slot = grant.slots[at]
            assert slot is not None
            view = node.store.view(slot)
            if block < blocks and checksum(view) != checksum(record_bytes(A[block], part)):
                return False
            at += 1
    return at == len(grant.slots)


def test_slots_are_leased_while_the_last_are_read(node: Node, disk: HeldDisk) -> None:
    async def work() -> None:
        grant = await acquire(node)
        assert grant.leased
        assert grant.hit_blocks == len(A)
        assert {span.part for span in grant.spans} == {FULL, WINDOW}
        first = await node.store.gets.ready(DAEMON_SESSION, grant.lease_id, 1)
        assert 1 <= first.blocks < len(A)
        assert not first.over
        assert right(node, grant, first.blocks)
        whole = asyncio.create_task(
            node.store.gets.ready(DAEMON_SESSION, grant.lease_id, len(A) + 7)
        )
        done, _ = await asyncio.wait({whole}, timeout=0.2)
        assert not done, "the disk holds the rest back"
        other = await node.store.gets.ready(DAEMON_SESSION, grant.lease_id + 1, 1)
        assert other == Ready(0, over=True)
        disk.gate.set()
        assert await whole == Ready(len(A), over=False)
        assert right(node, grant, len(A))
        assert node.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
        gone = await node.store.gets.ready(DAEMON_SESSION, grant.lease_id, 1)
        assert gone == Ready(0, over=True)
        again = await acquire(node)
        assert again.ready_blocks is None, "all of it is there"

    node.run(work())


def test_a_read_that_fails_ends_the_wait_and_what_came_is_a_hit(node: Node, disk: HeldDisk) -> None:
    async def work() -> None:
        grant = await acquire(node)
        waiting = asyncio.create_task(node.store.gets.ready(DAEMON_SESSION, grant.lease_id, len(A)))
        await asyncio.sleep(0.05)
        disk.error = OSError(5, "the disk is broken")
        disk.gate.set()
        ready = await waiting
        assert ready.over
        assert not ready.given_up
        assert ready.blocks < len(A)
        assert right(node, grant, ready.blocks)
        node.store.release(DAEMON_SESSION, [grant.lease_id])

    node.run(work())


def test_a_record_that_is_wrong_is_never_said_to_be_there(node: Node, disk: HeldDisk) -> None:
    async def work() -> None:
        grant = await acquire(node)
        disk.lies = True
        disk.gate.set()
        ready = await node.store.gets.ready(DAEMON_SESSION, grant.lease_id, len(A))
        assert ready.over
        assert not ready.given_up
        assert ready.blocks < len(A)
        assert right(node, grant, ready.blocks)
        node.store.release(DAEMON_SESSION, [grant.lease_id])
        disk.lies = False
        plain = await node.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=20.0)
        assert plain.hit_blocks < len(A), "the wrong ones were dropped"
        assert right(node, plain, len(A))

    node.run(work())


def test_a_load_that_loses_its_race_ends_the_wait(node: Node, disk: HeldDisk) -> None:
    """Computing a block takes 10 ms: the disk has much less than a second for all of them, and
    would hold the last ones back for longer than anybody waits here."""

    async def work() -> None:
        grant = await acquire(node, recompute_s_per_block=0.01)
        assert grant.ready_blocks is not None
        for _ in ("before it has lost", "after that"):
            asked = node.store.gets.ready(DAEMON_SESSION, grant.lease_id, len(A))
            ready = await asyncio.wait_for(asked, LOST_S)
            assert ready.over
            assert ready.given_up
            assert ready.blocks < len(A)
        node.store.release(DAEMON_SESSION, [grant.lease_id])
        again = node.store.gets.acquire(
            DAEMON_SESSION, SPEC.id, A, wait_s=20.0, recompute_s_per_block=0.01
        )
        plain = await asyncio.wait_for(again, LOST_S)
        assert plain.hit_blocks <= ready.blocks, "nobody waits for the rest again"
        disk.gate.set()

    node.run(work())


def test_nobody_is_answered_early_who_did_not_ask_or_while_the_pace_is_unknown(
    node: Node, disk: HeldDisk
) -> None:
    async def work() -> None:
        plain = asyncio.create_task(
            node.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=20.0)
        )
        done, _ = await asyncio.wait({plain}, timeout=0.1)
        assert not done
        disk.gate.set()
        grant = await plain
        assert grant.ready_blocks is None
        assert right(node, grant, len(A))

    node.run(work())
