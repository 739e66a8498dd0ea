"""Nodes that share a real pool: window groups, lossy blocks, and deletes that race with puts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import Unavailable
from kvstore.model.outcome import Reason
from kvstore.move import pool_side, pool_sink
from kvstore.testing.mooncake import INSTALL, Mooncake, has_mooncake
from kvstore.tier.pool import PoolFailed, PoolWrite, record_name
from tests.store.lossy_node import BASES, FINES, LossyNode
from tests.store.lossy_node import chain as lossy_chain
from tests.store.node import FULL, SPEC, WINDOW, Node, chain

pytestmark = pytest.mark.skipif(not has_mooncake(), reason=INSTALL)


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    with Mooncake() as mooncake:
        yield mooncake.start()


def settled(node: Node) -> bool:
    assert node.store._node.pool is not None
    return not node.store._node.pool.stats()["puts_waiting"]


def shared(node: Node, *, durable: bool = True) -> None:
    """Wait until what was used again is in the pool."""
    if durable:
        assert node.flush()
    node.until(lambda: settled(node))
    assert node.store._node.pool is not None
    sink = node.store._node.pool._sink
    assert node.run(sink.settled(node.now() + 10))


def refused(node: Node) -> dict[str, float]:
    found = node.metrics.totals().get("pool_refused_records", {})
    return {reason: count for reason, count in found.items() if count}


def test_a_prefix_with_windows_comes_back_as_it_was_put(mooncake: Mooncake, tmp_path: Path) -> None:
    keys = chain(1, 40)
    with Node(tmp_path / "one", pool=mooncake.url) as one:
        one.put(keys)
        shared(one)
        assert not mooncake.exists(record_name(SPEC.id, keys[0], FULL))  # used once
        assert one.get(keys) == 40
        shared(one)
        assert mooncake.exists(record_name(SPEC.id, keys[0], FULL))
        assert mooncake.exists(record_name(SPEC.id, keys[39], WINDOW))
        assert not refused(one)
        with Node(None, pool=mooncake.url, beside=one) as two:
            two.put(keys, 0, 10)  # of its own; the rest is in the pool
            assert two.get(keys, request_id="r") == 40
            (outcome,) = two.store.report.outcomes("r", 1)
            assert (outcome.pool_blocks, outcome.object_blocks, outcome.ending) == (30, 0, None)
            # A resume in the middle needs a window before its own blocks, and finds it there.
            assert two.get(keys[:25], skip_blocks=20) == 25
        with Node(None, pool=mooncake.url, beside=one) as two:
            mooncake.change(record_name(SPEC.id, keys[20], FULL), "cut")
            assert two.get(keys, request_id="r") < 40
            (outcome,) = two.store.report.outcomes("r", 1)
            assert outcome.ending is not None
            assert outcome.ending.reason is Reason.POOL_CORRUPT


def test_lossy_blocks_come_without_their_fine_parts(mooncake: Mooncake, tmp_path: Path) -> None:
    """Their records have sizes of their own, and the first block is exact."""
    keys = lossy_chain(7)
    with LossyNode(tmp_path / "one", pool=mooncake.url, fine=True) as one:
        one.store_blocks(keys)
        assert one.read(keys)[0] == len(keys)
        shared(one)
        namespace_id = one.planner.index.by_key(keys[0]).namespace_id  # type: ignore[union-attr]
        assert mooncake.exists(record_name(namespace_id, keys[3], BASES[0]))
        assert not mooncake.exists(record_name(namespace_id, keys[3], FINES[0]))
        with LossyNode(None, pool=mooncake.url, beside=one) as two:
            assert two.read(keys) == (len(keys), 0)
        with LossyNode(None, pool=mooncake.url, beside=one) as two:
            assert two.read(keys, refined=True)[0] == 0  # it insists


def test_what_is_deleted_while_it_is_put_is_not_there_afterwards(
    mooncake: Mooncake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(3, 6)
    with Node(tmp_path / "one", pool=mooncake.url) as node:
        put, begun, go_on = node.pool.put, asyncio.Event(), asyncio.Event()

        async def held_back(writes: list[PoolWrite], deadline: float) -> Any:
            begun.set()
            await go_on.wait()
            return await put(writes, deadline)

        monkeypatch.setattr(node.pool, "put", held_back)
        node.put(keys)
        assert node.flush()
        assert node.get(keys) == 6
        node.run(begun.wait())

        async def delete() -> int:
            deleting = asyncio.create_task(node.store.deletes.delete(SPEC.id, keys[2:4]))
            await asyncio.sleep(0.2)
            assert not deleting.done()  # it waits for the put, which is of these keys
            go_on.set()
            return await deleting

        assert node.run(delete()) == 2
        there = [mooncake.exists(record_name(SPEC.id, key, FULL)) for key in keys]
        assert there == [True, True, False, False, True, True]


def test_what_the_pool_brings_back_by_itself_stays_deleted(
    mooncake: Mooncake, tmp_path: Path
) -> None:
    """From a disk, or a stale copy of its master. A restarted node still knows, by its files."""
    keys, path = chain(8, 6), tmp_path / "one"
    names = [record_name(SPEC.id, key, part) for key in keys for part in (FULL, WINDOW)]
    with Node(path, pool=mooncake.url) as node:
        node.put(keys)
        assert node.flush()
        assert node.get(keys) == 6
        shared(node)
        for name in names:
            mooncake.copy(name, f"saved/{name}")
        node.run(node.store.deletes.delete(SPEC.id, keys[3:]))
        node.run(node.store.deletes.clear(SPEC.id))
    with Node(path, pool=mooncake.url) as node:
        for name in names:
            mooncake.copy(f"saved/{name}", name)
        assert node.get(keys) == 0
        node.until(lambda: not mooncake.exists(names[0]))  # it is removed once it was seen
        node.put(keys)  # again: that is another value
        assert node.flush()
        assert node.get(keys) == 6
        shared(node)
        assert mooncake.exists(names[0])
    (path / "POOL.a").write_bytes(b"x" * 100)  # a damaged one counts as none: there is its twin
    with Node(path, pool=mooncake.url) as node:
        graves = node.store._node.pool._graves  # type: ignore[union-attr]
        assert graves.loaded
        assert graves.floor(SPEC.id, keys[0]) > 0

        async def evicted() -> None:
            node.planner.clear(SPEC.id)

        node.run(evicted())
        assert node.get(keys) == 6  # from the pool: put after the delete


def test_a_put_that_ended_nobody_knows_how_holds_deletes_up(
    mooncake: Mooncake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its process was killed: Mooncake may still end it. Nothing else is put meanwhile."""
    keys = chain(4, 2)
    monkeypatch.setattr(pool_side, "DELETE_S", 1.0)
    monkeypatch.setattr(pool_sink, "WAIT_S", 0.3)
    with Node(tmp_path / "one", pool=mooncake.url) as node:
        name = record_name(SPEC.id, keys[0], FULL)

        async def killed(writes: list[PoolWrite], deadline: float) -> Any:
            mooncake.begin(name)
            raise PoolFailed("its process has ended", reason="gone")

        with monkeypatch.context() as patched:
            patched.setattr(node.pool, "put", killed)
            node.put(keys)
            assert node.flush()
            assert node.get(keys) == 2
            node.until(lambda: refused(node).get("gone", 0) > 0)
        with pytest.raises(Unavailable, match="delete again"):
            node.run(node.store.deletes.clear(SPEC.id))
        node.put(chain(5, 2))
        assert node.flush()
        assert node.get(chain(5, 2)) == 2
        node.run(asyncio.sleep(1.0))
        assert not mooncake.exists(record_name(SPEC.id, chain(5, 2)[0], FULL))
        mooncake.revoke(name)
        node.run(node.store.deletes.clear(SPEC.id))
        assert not mooncake.exists(name)


def test_what_is_not_put_is_counted(
    mooncake: Mooncake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_sink, "QUEUE_MAX", 4)
    monkeypatch.setattr(pool_sink, "TICK_S", 0.5)
    with Node(tmp_path / "one", pool=mooncake.url) as node:
        keys = chain(6, 6)
        node.put(keys)
        assert node.flush()
        assert node.get(keys) == 6
        assert refused(node) == {"queue": 2}

        async def evicted() -> None:  # before their turn
            node.planner.clear(SPEC.id)

        node.run(evicted())
        node.until(lambda: settled(node))
        assert refused(node) == {"queue": 2, "evicted": 4}
