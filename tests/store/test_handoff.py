"""Prefill and decode by two engines of one daemon, whose requests come at the same moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import Grant
from kvstore.model.member import NodeId, Origin
from tests.store.node import SPEC, Node, chain
from tests.store.peers import joined, member

A = chain(1, 20)
PREFILLER = "10.0.0.7:8000"


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(None) as node:
        node.store.sessions.open("prefiller", "engine", (PREFILLER,))
        yield node


def asked(node: Node, source: str, expect: int = 20, **options: Any) -> asyncio.Task[Grant]:
    """Ask for a prefix that `source` is computing, and let the node look at what there is."""
    asking = node.loop.create_task(
        node.store.gets.acquire(
            DAEMON_SESSION, SPEC.id, A, origin=Origin(source, expect), **{"wait_s": 10.0, **options}
        )
    )
    node.run(asyncio.sleep(0.05))
    return asking


def hit(node: Node, asking: asyncio.Task[Grant]) -> int:
    grant = node.run(asyncio.wait_for(asking, 10))
    node.store.release(DAEMON_SESSION, [grant.lease_id])
    assert not node.store._node.arrivals._waiting
    return grant.hit_blocks


@pytest.mark.parametrize("pace", [0.0, 0.4], ids=["", "told-its-pace"])
def test_blocks_of_an_engine_of_this_host_are_waited_for(node: Node, pace: float) -> None:
    node.put(A, 0, 4)
    asking = asked(node, PREFILLER, recompute_s_per_block=pace)
    for begin in (4, 12):
        assert not asking.done()
        node.put(A, begin, begin + 8)
        node.run(asyncio.sleep(0.02))
    assert hit(node, asking) == 20
    assert node.metrics.totals()["hit_blocks"]["dram"] == 20


def test_what_is_expected_is_enough(node: Node) -> None:
    asking = asked(node, PREFILLER, expect=8)
    node.put(A, 0, 8)
    assert hit(node, asking) == 8


def test_who_computes_is_not_waited_for_longer_than_computing_takes(node: Node) -> None:
    """A block takes 10 ms: all of them 0.2 s, and what came buys as much more."""
    began = node.loop.time()
    asking = asked(node, PREFILLER, recompute_s_per_block=0.01)
    node.put(A, 0, 10)
    assert hit(node, asking) == 10
    assert 0.29 < node.loop.time() - began < 1.0


def test_the_deadline_of_a_request_bounds_it(node: Node) -> None:
    began = node.loop.time()
    assert hit(node, asked(node, PREFILLER, wait_s=0.2)) == 0
    assert 0.15 <= node.loop.time() - began < 1.0


@pytest.mark.parametrize(("pace", "wait_s"), [(0.1, 10.0), (0.0, 2.0)], ids=["paced", "unpaced"])
def test_after_a_wait_in_vain_there_is_time_for_the_bucket(
    tmp_path: Path, pace: float, wait_s: float
) -> None:
    """The time that was waited is not held against a load that takes a few milliseconds."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    with Node(tmp_path / "1", bucket=bucket) as writer:
        writer.put(A, durable=True)
        assert writer.flush()
    with Node(tmp_path / "2", bucket=bucket) as node:
        node.store.sessions.open("prefiller", "engine", (PREFILLER,))
        began = node.loop.time()
        asking = asked(node, PREFILLER, recompute_s_per_block=pace, wait_s=wait_s)
        assert hit(node, asking) == 20
        assert node.loop.time() - began > 1.4


def test_an_engine_that_is_gone_is_not_waited_for(node: Node) -> None:
    session = node.store.sessions.open("another", "engine", ("10.0.0.7:8002",))
    process = node.store.sessions.join(session, "another")
    began = node.loop.time()
    asking = asked(node, "10.0.0.7:8002")
    assert not asking.done()
    node.store.sessions.leave(process)
    assert hit(node, asking) == 0
    assert node.loop.time() - began < 3.0


def test_nobody_waits_for_an_engine_that_is_not_here(node: Node) -> None:
    assert asked(node, "10.0.0.7:8001").done()
    assert asked(node, PREFILLER, expect=0).done()


def test_an_engine_does_not_wait_for_itself(node: Node) -> None:
    session = node.store.sessions.open("decoder", "engine", ("10.0.0.7:8001",))
    node.store.sessions.join(session, "decoder")
    for source, waits in (("10.0.0.7:8001", False), (PREFILLER, True)):
        asking = node.loop.create_task(
            node.store.gets.acquire(session, SPEC.id, A, wait_s=0.3, origin=Origin(source, 20))
        )
        node.run(asyncio.sleep(0.05))
        assert asking.done() != waits
        node.run(asyncio.wait_for(asking, 10))


def test_a_request_may_name_its_own_daemon_in_a_fleet(node: Node) -> None:
    other = member(1)
    with Node(None, beside=node) as lender:
        peers, links = joined(node, {other: lender})
        own = node.store.node_id
        assert own == NodeId("0" * 32)
        for source in (own, PREFILLER):
            asking = asked(node, source)
            assert not asking.done()
            node.put(A, 0, 20)
            assert hit(node, asking) == 20
            node.run(node.store.deletes.delete(SPEC.id, A))
        assert "peer_refused" not in node.metrics.totals()
        assert not links[other.node].matches
        node.tending.cancel()  # type: ignore[attr-defined]
        with contextlib.suppress(asyncio.CancelledError):
            node.loop.run_until_complete(node.tending)  # type: ignore[attr-defined]
        node.run(peers.close())
