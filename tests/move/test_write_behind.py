"""How many batches are on their way down at once, and what is deleted meanwhile."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import Span
from kvstore.model.checksum import checksum
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file.segment_file import parse_segment_name
from tests.store.node import FULL, RECORD, SPEC, Node, chain

BATCH_BLOCKS = 4


class HeldDisk(FaultyDisk):
    """Holds calls of one kind while `held`; counts those that have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.held = {"fdatasync"}
        self.fault = self._hold

    def _hold(self, call: str) -> None:
        self.begun[call] += 1
        if call in self.held:
            assert self.gate.wait(10)


@contextmanager
def node_on(disk: HeldDisk, path: Path) -> Iterator[Node]:
    with Node(path, disk=disk, group_commit_bytes=BATCH_BLOCKS * RECORD) as node:
        node.put(chain(1, 1), parts=[FULL], durable=True)  # the segment is there
        disk.begun.clear()
        try:
            yield node
        finally:
            disk.gate.set()


def settle(node: Node, condition: Callable[[], bool]) -> bool:
    """Let the node work until it is so; False if nothing more is to be expected."""

    async def wait() -> bool:
        for _ in range(100):
            if condition():
                return True
            await asyncio.sleep(0.005)
        return False

    return node.run(wait())


def test_full_batches_do_not_wait_for_the_sync_of_others(tmp_path: Path) -> None:
    disk = HeldDisk()
    with node_on(disk, tmp_path / "kv") as node:
        disk.gate.clear()
        node.put(chain(2, 5 * BATCH_BLOCKS), parts=[FULL])
        node.until(lambda: disk.begun["pwritev"] == 3)
        assert not settle(node, lambda: disk.begun["pwritev"] > 3), "three are the most"
        disk.gate.set()
        assert node.flush()
        assert disk.begun["pwritev"] == 5


def test_a_flush_that_may_not_wait_says_whether_all_is_durable(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", write_on_demotion=True) as node:
        node.put(chain(2, 8), parts=[FULL])
        assert not node.run(node.store.puts.flush(0.0))
        assert node.flush()
        assert node.run(node.store.puts.flush(0.0))


def test_less_than_a_batch_waits_so_that_one_sync_covers_more(tmp_path: Path) -> None:
    disk = HeldDisk()
    with node_on(disk, tmp_path / "kv") as node:
        disk.gate.clear()
        node.put(chain(2, 1), parts=[FULL])
        node.until(lambda: disk.begun["fdatasync"] == 1)
        for name in (3, 4, 5):
            node.put(chain(name, 1), parts=[FULL])
        assert not settle(node, lambda: disk.begun["pwritev"] > 1)
        disk.gate.set()
        assert node.flush()
        assert disk.begun["pwritev"] == 4
        assert disk.begun["fdatasync"] == 2


def test_beside_reads_there_is_one_batch(tmp_path: Path) -> None:
    cold = chain(9, 3)
    with Node(tmp_path / "kv") as node:
        node.put(cold, durable=True)
    disk = HeldDisk()
    with node_on(disk, tmp_path / "kv") as node:
        disk.held = {"preadv", "fdatasync"}
        disk.gate.clear()
        reading = node.loop.create_task(
            node.store.gets.acquire(DAEMON_SESSION, SPEC.id, cold, wait_s=10.0)
        )
        node.until(lambda: disk.begun["preadv"] > 0)
        node.put(chain(2, 5 * BATCH_BLOCKS), parts=[FULL])
        node.until(lambda: disk.begun["pwritev"] == 1)
        assert not settle(node, lambda: disk.begun["pwritev"] > 1)
        disk.gate.set()

        async def read() -> int:
            return (await reading).hit_blocks

        assert node.run(read()) == len(cold)
        assert node.flush()


@pytest.mark.parametrize("turns", range(10))
def test_what_is_deleted_as_its_batch_begins_is_not_in_the_way_of_the_tombstone(
    tmp_path: Path, turns: int
) -> None:
    """A frame of a higher number than the tombstone would be back after a kill, unless its hole was
    punched before."""
    disk = FaultyDisk()
    keys = chain(2, BATCH_BLOCKS)
    with Node(tmp_path / "kv", disk=disk) as node:
        node.put(chain(1, 1), durable=True)
        disk.fault = failing("punch", errno.EIO)

        async def put_and_delete() -> None:
            store, spans = node.store, (Span(FULL, 0, len(keys)),)
            grant = await store.puts.reserve(
                DAEMON_SESSION, SPEC.id, keys, first_block=0, parent=None, spans=spans
            )
            sums = [checksum(store.view(slot)) for slot in grant.slots if slot]
            await store.puts.commit(DAEMON_SESSION, grant.lease_id, sums, durable=False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await store.deletes.delete(SPEC.id, keys)

        node.run(put_and_delete())
        node.flush()
        disk.kill()
    with Node(tmp_path / "kv") as node:
        node.recall()
        assert [node.planner.index.by_key(key) for key in keys] == [None] * len(keys)


class AskingDisk(FaultyDisk):
    """While it `asks`, each write of frames waits to be told whether it succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = False
        self.asked: list[SimpleQueue[bool]] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.asks and parse_segment_name(self.opened[fd].name) is not None:
            answer: SimpleQueue[bool] = SimpleQueue()
            self.asked.append(answer)
            if not answer.get(timeout=10):
                raise OSError(errno.EIO, "told to")
        return super().pwritev(fd, buffers, offset)

    def let_go(self) -> None:
        """Ask no more, and let what waits succeed."""
        self.asks = False
        for answer in self.asked:
            answer.put(True)


def test_a_flush_waits_for_what_another_flush_has_queued_anew(tmp_path: Path) -> None:
    """The file tier has answered for all that it waited for, and some of it was refused."""
    disk, keys = AskingDisk(), chain(2, 2 * BATCH_BLOCKS)
    with Node(tmp_path / "kv", disk=disk, group_commit_bytes=BATCH_BLOCKS * RECORD) as node:
        node.put(chain(1, 1), parts=[FULL], durable=True)  # the segment is there
        disk.asks = True
        try:
            node.put(keys, parts=[FULL])
            first = node.loop.create_task(node.store.puts.flush(10.0))
            node.until(lambda: len(disk.asked) == 2)
            disk.asked[0].put(False)
            node.until(lambda: node.planner.dirty.failed > 0)
            second = node.loop.create_task(node.store.puts.flush(10.0))
            node.until(lambda: node.planner.dirty.retried > 0)
            disk.asked[1].put(True)
            node.until(lambda: len(disk.asked) == 3)
            assert not first.done()
            disk.asked[2].put(True)
            node.until(lambda: first.done() and second.done())
            assert first.result()
            assert second.result()
            blocks = [node.planner.index.by_key(key) for key in keys]
            records = [block.record(FULL) for block in blocks if block is not None]
            assert [r is not None and r.frame is not None for r in records] == [True] * len(keys)
        finally:
            disk.let_go()


def test_a_flush_ends_when_what_it_waits_for_is_deleted(tmp_path: Path) -> None:
    disk = HeldDisk()
    keys = chain(2, 1)
    with node_on(disk, tmp_path / "kv") as node:
        save = node.write_behind._policies.save_now_and_then

        async def slow() -> None:
            await asyncio.sleep(0.5)
            await save()

        node.write_behind._policies.save_now_and_then = slow  # type: ignore[method-assign]

        async def flush_while_deleting() -> float:
            began = node.now()
            flushing = asyncio.ensure_future(node.store.puts.flush(10.0))
            await asyncio.sleep(0.05)
            await node.store.deletes.delete(SPEC.id, keys)
            await flushing
            return node.now() - began

        node.put(keys, parts=[FULL])
        assert node.run(flush_while_deleting()) < 5.0
