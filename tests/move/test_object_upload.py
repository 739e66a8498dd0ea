"""What is uploaded, and when it is uploaded again: what the bucket lost, or never got whole."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.decide.index import HeldSlot
from kvstore.model.block import BlockKey, padded
from kvstore.model.errors import Unavailable
from kvstore.move import object_upload
from kvstore.move.object_upload import TRIES_MAX, ObjectUpload
from tests.store.node import FULL, RECORD, SPEC, Node, chain

RUN = 8
A, B = chain(1), chain(2)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_upload, "run_blocks", lambda namespace: RUN)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def upload_of(node: Node) -> ObjectUpload:
    objects = node.store._objects
    assert objects is not None
    return objects._upload


def upload(node: Node) -> None:
    node.run(upload_of(node).upload(math.inf))


def ends(bucket: Path) -> list[int]:
    """Return, of each object with blocks of A, where its run ends."""
    names = [path.name for path in bucket.rglob("*") if path.is_file()]
    return sorted(
        at + 1 for at, key in enumerate(A) for name in names if name.startswith(key.hex())
    )


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks at which the runs end that the bucket was asked for."""
    asked: list[int] = []
    is_there = ObjectUpload._is_there

    async def noted(self: ObjectUpload, namespace_id: Any, keys: Any, wanted: Any) -> bool:
        asked.append(A.index(keys[-1]) + 1)
        return await is_there(self, namespace_id, keys, wanted)

    monkeypatch.setattr(ObjectUpload, "_is_there", noted)
    return asked


def test_runs_that_the_bucket_has_are_not_looked_up_again(
    tmp_path: Path, bucket: Path, looked_up: list[int]
) -> None:
    with Node(tmp_path / "kv", bucket=bucket) as node:
        node.put(A, 0, 18, durable=True)
        upload(node)
        assert ends(bucket) == looked_up == [8, 16, 18]
        looked_up.clear()
        node.put(A, 18, 20, durable=True)
        upload(node)
        assert looked_up == [20]


def test_what_is_put_again_after_a_clear_is_uploaded_again(tmp_path: Path, bucket: Path) -> None:
    with Node(tmp_path / "kv", bucket=bucket) as node:
        node.put(A, durable=True)
        upload(node)
        assert ends(bucket) == [8, 16, 24]
        node.run(node.store.deletes.clear(SPEC.id))
        assert ends(bucket) == []
        node.put(A, durable=True)
        upload(node)
        assert ends(bucket) == [8, 16, 24]


def test_a_run_of_which_a_block_was_deleted_is_uploaded_again(tmp_path: Path, bucket: Path) -> None:
    """Its object left as a whole. The runs behind it are still there, and do not hide that."""
    with Node(tmp_path / "kv", bucket=bucket) as node:
        node.put(A, 0, 20, durable=True)
        upload(node)
        node.run(node.store.deletes.delete(SPEC.id, A[5:6]))
        assert ends(bucket) == [16, 20]
        node.put(A, 20, 21, durable=True)  # while the block is missing
        upload(node)
        assert ends(bucket) == [16, 20, 21]
        node.put(A, 5, 6, durable=True)
        node.put(A, 21, 22, durable=True)
        upload(node)
        assert 8 in ends(bucket)


def test_what_is_deleted_while_it_is_written_is_not_taken_for_uploaded(
    tmp_path: Path, bucket: Path
) -> None:
    with Node(tmp_path / "kv", bucket=bucket) as node:
        node.put(A, 0, 8, durable=True)
        node.gate.holds = lambda kind, name: kind == "put" and A[7].hex() in name
        uploading = node.loop.create_task(upload_of(node).upload(math.inf))
        node.run(node.gate.arrived.wait())
        deleting = node.loop.create_task(node.store.deletes.delete(SPEC.id, A[5:6]))
        node.run(asyncio.sleep(0.05))
        node.gate.holds = lambda kind, name: False
        node.gate.opened.set()
        node.loop.run_until_complete(asyncio.gather(uploading, deleting))
        assert ends(bucket) == []
        node.put(A, 5, 6, durable=True)
        node.put(A, 8, 9, durable=True)
        upload(node)
        assert ends(bucket)[-2:] == [8, 9]


def slots_of(node: Node, keys: Sequence[BlockKey]) -> list[HeldSlot]:
    blocks = map(node.planner.index.by_key, keys)
    records = [block.record(FULL) for block in blocks if block is not None]
    return [record.resident for record in records if record is not None and record.resident]


@pytest.fixture(params=[[0, 1, 2, 3], [0, 1, 6, 7], []], ids=["start", "hole", "nothing"])
def cramped(request: pytest.FixtureRequest, tmp_path: Path, bucket: Path) -> Iterator[Node]:
    """A node with half of a run in the arena, or nothing of it, and no room for the rest."""
    with Node(tmp_path / "kv", bucket=bucket, arena_bytes=16 * padded(RECORD)) as node:
        node.put(A, 0, RUN, parts=(FULL,), durable=True)
        kept = [A[at] for at in request.param]
        with node.planner.pinned(slots_of(node, kept)):
            node.put(B, 0, 16 - len(kept), parts=(FULL,), durable=True, wait_s=5.0)
        assert len(slots_of(node, A)) == len(kept)
        yield node


def test_a_run_that_does_not_come_up_whole_is_uploaded_later(cramped: Node, bucket: Path) -> None:
    with cramped.planner.pinned(slots_of(cramped, [*A, *B])):
        upload(cramped)
        assert ends(bucket) == []
        assert upload_of(cramped).waiting == 1
        cramped.run(upload_of(cramped).upload(cramped.now()))
        assert upload_of(cramped).waiting == 1, "not at once"
    upload(cramped)
    assert ends(bucket) == [RUN]
    assert upload_of(cramped).waiting == 0


def test_a_run_that_never_comes_up_whole_is_given_up_until_its_prefix_grows(
    cramped: Node, bucket: Path
) -> None:
    with cramped.planner.pinned(slots_of(cramped, [*A, *B])):
        for _ in range(TRIES_MAX):
            assert upload_of(cramped).waiting
            upload(cramped)
        assert upload_of(cramped).waiting == 0
        assert cramped.metrics.totals()["object_refused_writes"]["dram"] == 1
    cramped.put(A, RUN, RUN + 1, parts=(FULL,), durable=True)
    upload(cramped)
    assert ends(bucket) == [RUN, RUN + 1]


def test_a_stop_does_not_wait_for_runs_that_have_no_room(tmp_path: Path, bucket: Path) -> None:
    with Node(tmp_path / "kv", bucket=bucket, arena_bytes=4 * padded(RECORD)) as node:
        for at in range(RUN):
            node.put(A, at, at + 1, parts=(FULL,), durable=True, wait_s=5.0)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert ends(bucket) == []


def test_a_run_that_left_while_the_bucket_was_asked_is_not_taken_for_uploaded(
    tmp_path: Path, bucket: Path
) -> None:
    with Node(tmp_path / "kv", bucket=bucket) as node:
        node.put(A, 0, RUN, durable=True)
        node.gate.holds = lambda kind, name: kind == "list"
        uploading = node.loop.create_task(upload_of(node).upload(math.inf))

        async def leave() -> None:
            await node.gate.arrived.wait()
            node.planner.delete(SPEC.id, A)  # as if it was evicted: nobody tells the bucket
            node.gate.holds = lambda kind, name: False
            node.gate.opened.set()
            await uploading

        node.run(leave())
        node.put(A, 0, RUN, durable=True)
        upload(node)
        assert ends(bucket) == [RUN]


def test_a_run_that_failed_is_not_hidden_by_those_behind_it(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node(tmp_path / "kv", bucket=bucket) as node:
        node.put(A, durable=True)
        write, failing = node.objects.writes.write, [A[8]]

        async def fails(frames: Any, deadline: float) -> Any:
            if frames[0][0].blocks[0].key in failing:
                raise Unavailable("the bucket is at its cap")
            return await write(frames, deadline)

        monkeypatch.setattr(node.objects.writes, "write", fails)
        upload(node)
        assert ends(bucket) == [8, 24]
        failing.clear()
        upload(node)
        assert ends(bucket) == [8, 16, 24]
