"""Nodes that share a bucket: what one has uploaded the others find, and deleted means deleted."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import (
    PAGE_NBYTES,
    BlockKey,
    Buffer,
    Group,
    Namespace,
    Part,
    Span,
    padded,
)
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import Reason
from kvstore.move import object_source
from kvstore.tier.object import run_blocks
from kvstore.tier.object.names import directory
from tests.store.node import FULL, SPEC, WINDOW, Node, chain
from tests.tier.object.gate import GatedBucket, buries

A, B = chain(1), chain(2)
PAGES = Namespace(2, (Group("all", PAGE_NBYTES),), ())


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def objects_in(bucket: Path) -> list[Path]:
    return [path for path in bucket.rglob("*") if path.is_file()]


def pages(blocks: int) -> list[BlockKey]:
    return KeyChain(root_key(PAGES.id), 2).update([7] * 2 * blocks)


def put_pages(node: Node, keys: Sequence[BlockKey]) -> None:
    node.store.namespaces.register(PAGES)
    spans = (Span(Part(0, 0), 0, len(keys)),)
    reserving = node.store.puts.reserve(
        DAEMON_SESSION, PAGES.id, keys, first_block=0, parent=None, spans=spans
    )
    grant = node.run(reserving)
    for slot in grant.slots:
        assert slot is not None
        node.store.view(slot)[:] = bytes(PAGE_NBYTES)
    sums = [checksum(bytes(PAGE_NBYTES))] * len(keys)
    node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums, durable=True))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_one_node_stored_another_finds(tmp_path: Path, bucket: Path, codec: str) -> None:
    with Node(tmp_path / "1", bucket=bucket, codec=codec) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket, codec=codec) as two:
        assert two.get(A) == 20
        assert two.metrics.totals()["hit_blocks"]["object"] == 20
        assert two.flush()
    with Node(tmp_path / "2") as again:  # it is on this node's disk now
        assert again.get(A) == 20


def test_a_prefix_that_diverges_or_has_grown_is_found_as_far_as_it_goes(
    tmp_path: Path, bucket: Path
) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 8, durable=True)
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 8, 20, durable=True)
    other = [*A[:12], *B[12:]]
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(other) == 12
        assert two.get(A) == 20
        assert two.get(B) == 0


def test_only_what_a_hit_needs_comes_up(tmp_path: Path, bucket: Path) -> None:
    """Of the window group, the last blocks only."""
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        two.get(A)
        blocks = [two.planner.index.by_key(key) for key in A[:20]]
        assert all(block is not None and block.record(FULL) for block in blocks)
        first = SPEC.groups[WINDOW.group].blocks_needed(20, SPEC.block_tokens).start
        has_window = [block.record(WINDOW) is not None for block in blocks if block is not None]
        assert has_window == [False] * first + [True] * (20 - first)


def test_what_is_there_already_is_not_fetched_and_the_rest_is(tmp_path: Path, bucket: Path) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        two.put(A, 0, 10)
        assert two.get(A) == 20
        hits = two.metrics.totals()["hit_blocks"]
        assert (hits["dram"], hits["object"]) == (10, 10)


def test_the_start_of_a_prefix_comes_up_while_its_end_is_looked_for(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_source, "WINDOW_NBYTES", 64 * PAGE_NBYTES)
    keys = pages(600)
    assert run_blocks(PAGES) == 256
    with Node(tmp_path / "1", bucket=bucket) as one:
        put_pages(one, keys)
    with Node(tmp_path / "2", bucket=bucket, arena_bytes=16 << 20) as two:
        two.store.namespaces.register(PAGES)
        last_run = directory(PAGES.id, keys[512])
        two.gate.holds = lambda kind, name: (kind, name) == ("list", last_run)
        acquiring = two.loop.create_task(
            two.store.gets.acquire(DAEMON_SESSION, PAGES.id, keys, wait_s=15.0)
        )

        async def its_start_is_up() -> None:
            while two.planner.match(PAGES.id, keys).resident_blocks < 256:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        two.run(its_start_is_up())
        assert two.gate.arrived.is_set()
        assert not acquiring.done()
        two.gate.opened.set()
        grant = two.loop.run_until_complete(acquiring)
        assert grant.hit_blocks == 600
        two.store.release(DAEMON_SESSION, [grant.lease_id])


@pytest.mark.parametrize("everything", [False, True])
def test_what_one_node_deleted_no_node_finds(
    tmp_path: Path, bucket: Path, everything: bool
) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(A) == 20
        if everything:
            two.run(two.store.deletes.clear(SPEC.id))
        else:
            two.run(two.store.deletes.delete(SPEC.id, A[5:6]))
        left = 0 if everything else 5
        assert two.get(A) <= left  # what its window needs may be gone, too
    with Node(tmp_path / "3", bucket=bucket) as three:
        assert three.get(A) <= left


def test_clearing_all_reaches_what_only_the_bucket_has(tmp_path: Path, bucket: Path) -> None:
    """A node that starts with empty disks clears before any engine has named a namespace."""
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 8, durable=True)
    two = Node(tmp_path / "2", bucket=bucket)
    two.run(two.store.start())
    two.run(two.store.deletes.clear(None))
    two.store.namespaces.register(SPEC)
    assert two.get(A) == 0
    assert two.put(B, 0, 8, durable=True).durable
    assert two.get(B) == 8, "what comes later stays"
    two.run(two.store.close())
    two.loop.close()
    with Node(tmp_path / "2", bucket=bucket) as again:
        assert again.get(A) == 0
        assert again.get(B) == 8
    with Node(tmp_path / "3", bucket=bucket) as three:
        assert three.get(A) == 0


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_objects_collected_under_a_reader_are_a_shorter_hit(
    tmp_path: Path, bucket: Path, passed: int
) -> None:
    """The collection comes before one of the reader's requests: it gets right bytes, or a miss."""
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        gets = itertools.count()
        two.gate.holds = lambda kind, _: kind == "get" and next(gets) == passed

        async def collect_meanwhile() -> None:
            async with asyncio.timeout(10):
                await two.gate.arrived.wait()
            for path in objects_in(bucket):
                path.unlink()
            two.gate.opened.set()

        async def read() -> int:
            collecting = asyncio.create_task(collect_meanwhile())
            grant = await two.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=5.0)
            await collecting
            two.store.release(DAEMON_SESSION, [grant.lease_id])
            return grant.hit_blocks

        hit = two.run(read())
        assert hit < 20
        assert two.get(A) <= hit, "every byte of a hit is compared"
        assert two.put(A, 0, 20, durable=True).durable
        assert two.get(A) == 20
        assert (
            "task_failures" not in two.metrics.totals() or not two.metrics.totals()["task_failures"]
        )


def test_nothing_comes_up_while_its_delete_is_on_its_way_to_the_bucket(
    tmp_path: Path, bucket: Path
) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    stored = max(bucket.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    with Node(tmp_path / "2", bucket=bucket) as two:
        two.gate.holds = buries
        deleting = two.loop.create_task(two.store.deletes.delete(SPEC.id, A[5:6]))
        two.run(two.gate.arrived.wait())
        assert two.get(A) == 5, "what is before it may come"
        two.gate.opened.set()
        two.loop.run_until_complete(deleting)
        assert two.get(A) == 5
        assert not stored.exists(), "an object with a deleted block leaves"


def test_what_is_deleted_on_its_way_up_does_not_arrive(tmp_path: Path, bucket: Path) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(A[:1]) == 1  # its footer is known
        two.gate.holds = lambda kind, name: kind == "got"
        asked = two.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=5.0)
        acquiring = two.loop.create_task(asked)
        two.run(two.gate.arrived.wait())
        two.run(two.store.deletes.delete(SPEC.id, A[5:6]))
        two.gate.opened.set()
        grant = two.loop.run_until_complete(acquiring)
        assert grant.hit_blocks == 1
        two.store.release(DAEMON_SESSION, [grant.lease_id])
        assert two.get(A) == 1


@pytest.mark.parametrize(("left", "counted"), [(10, (4, 6)), (4, (4, 0)), (2, (2, 0))])
def test_a_hit_that_gets_shorter_before_it_is_leased_is_counted_as_what_is_left(
    left: int,
    counted: tuple[int, int],
    tmp_path: Path,
    bucket: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = pages(16)
    with Node(tmp_path / "1", bucket=bucket) as one:
        put_pages(one, keys)
    with Node(tmp_path / "2", bucket=bucket) as two:
        put_pages(two, keys[:4])

        async def deletes_meanwhile(*_: object) -> bool:
            await two.store.deletes.delete(PAGES.id, keys[left:])
            return True

        monkeypatch.setattr(two.store.gets._acquisition, "_refine", deletes_meanwhile)
        asked = two.store.gets.acquire(DAEMON_SESSION, PAGES.id, keys, wait_s=5.0)
        assert two.run(asked).hit_blocks == left
        hits = two.metrics.totals()["hit_blocks"]
        assert (hits["dram"], hits["object"]) == counted
        assert hits["file"] == 0


def test_what_is_deleted_while_it_is_prepared_for_upload_is_not_uploaded(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow_checksum(data: Buffer) -> int:
        begun.set()
        go_on.wait(10)
        return checksum(data)

    with Node(tmp_path / "1", bucket=bucket) as node:
        node.put(A, 0, 20, durable=True)
        monkeypatch.setattr("kvstore.move.object_upload.checksum", slow_checksum)
        upload = node.store._objects._upload.upload(math.inf)  # type: ignore[union-attr]
        uploading = node.loop.create_task(upload)
        node.run(asyncio.to_thread(begun.wait, 10))
        node.run(node.store.deletes.delete(SPEC.id, A[5:6]))
        go_on.set()
        node.loop.run_until_complete(uploading)
        assert not [path for path in objects_in(bucket) if path.name.startswith(A[19].hex())]


def test_namespaces_are_deleted_from_a_slow_bucket_at_once(tmp_path: Path, bucket: Path) -> None:
    async def answer_five_times_a_second(gate: GatedBucket) -> None:
        while True:
            await asyncio.sleep(0.2)
            gate.opened.set()
            gate.opened.clear()

    with Node(tmp_path / "1", bucket=bucket) as node:
        for number in range(50):
            node.store.namespaces.register(Namespace(2, SPEC.groups, (("model", str(number)),)))
        node.gate.holds = buries
        answering = node.loop.create_task(answer_five_times_a_second(node.gate))
        began = time.monotonic()
        node.run(node.store.deletes.clear(None))
        assert time.monotonic() - began < 5
        answering.cancel()


def test_what_came_from_the_bucket_is_not_stored_there_again(tmp_path: Path, bucket: Path) -> None:
    """Although not all of its parts came up."""
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    before = objects_in(bucket)
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(A) == 20
        assert two.flush()
    assert objects_in(bucket) == before


def test_a_rotten_object_is_a_miss(tmp_path: Path, bucket: Path) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    path = max(objects_in(bucket), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1  # in the payload of the first frame
    path.write_bytes(data)
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(A) == 0
        assert two.metrics.totals()["corrupt_blocks"]["object"] == 1


def test_a_rotten_record_is_asked_for_once_and_stored_anew(tmp_path: Path, bucket: Path) -> None:
    keys, good = A[:20], 5
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(keys, durable=True)
    before = objects_in(bucket)
    path = max(before, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[PAGE_NBYTES + good * padded(SPEC.record_nbytes(FULL)) + 100] ^= 1
    path.write_bytes(data)
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(keys) == 0  # what was asked for together
        assert two.get(keys) == good
        asked = two.metrics.totals()["object_requests"]
        for number in range(3):
            assert two.get(keys, request_id=f"again {number}") == good
            ending = two.store.report.outcomes(f"again {number}", 1)[0].ending
            assert ending is not None
            assert (ending.reason, ending.block) == (Reason.NEVER_STORED, good)
        assert two.metrics.totals()["object_requests"] == asked
        assert two.metrics.totals()["corrupt_blocks"]["object"] == 1
        two.put(keys, durable=True)
    assert objects_in(bucket) == before
    with Node(tmp_path / "3", bucket=bucket) as three:
        assert three.get(keys) == 20
        assert "corrupt_blocks" not in three.metrics.totals()


def test_a_bucket_that_vanished_costs_a_miss(tmp_path: Path, bucket: Path) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        aligned, deadline = run_blocks(SPEC), time.monotonic() + 10
        found = two.run(two.objects.lookups.find(SPEC.id, A, run_blocks=aligned, deadline=deadline))
        assert found.blocks == 20  # it is known, and then
        for path in objects_in(bucket):
            path.unlink()
        assert two.get(A) == 0


def test_who_computes_faster_than_the_bucket_answers_does_not_wait_for_it(
    tmp_path: Path, bucket: Path
) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(A, recompute_s_per_block=1e-7, request_id="fast") == 0
        ending = two.store.report.outcomes("fast", 1)[0].ending
        assert ending is not None
        assert ending.reason in (Reason.NEVER_STORED, Reason.SLOWER)


@pytest.mark.parametrize("under_way", [False, True], ids=["waiting", "under-way"])
def test_nothing_is_uploaded_to_a_bucket_that_was_erased(
    tmp_path: Path, bucket: Path, under_way: bool
) -> None:
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.gate.holds = lambda kind, name: kind == "put" and A[19].hex() in name
        objects = one.store._objects
        assert objects is not None
        objects._upload._rest_s = 0.0 if under_way else 60.0
        one.put(A, 0, 20, durable=True)
        if under_way:
            one.run(one.gate.arrived.wait())
        one.run(one.store.end_uploads())
        assert one.run(objects._tier.erase(10)) == "none"
        assert objects_in(bucket) == []
        one.gate.opened.set()
        one.put(B, 0, 20, durable=True)
    assert objects_in(bucket) == []
    with Node(tmp_path / "2", bucket=bucket) as two:
        assert two.get(A) == two.get(B) == 0
