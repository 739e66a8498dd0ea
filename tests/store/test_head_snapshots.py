"""Snapshots of heads, chunk by chunk, while blocks come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest

from kvstore.decide.heads import Heads, head_of
from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Group, Namespace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.peer.base import HeadsAsk, HeadsReply
from kvstore.store import head_snapshots
from kvstore.store.head_snapshots import KEPT_S, SHARED_S
from kvstore.store.lender import StoreLender
from kvstore.testing.samples import sample_keys
from tests.sim.loop import SimLoop
from tests.store.node import Node

SPEC = Namespace(256, (Group("all", 4096),), ())  # every block is a head
CHUNK = 16
KEYS = sample_keys("heads", 100)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(head_snapshots, "HEADS_MAX", CHUNK)
    with Node(None, loop=SimLoop(Random(1))) as node:
        node.planner.index.heads = Heads()
        node.store.namespaces.register(SPEC)
        yield node


def put(node: Node, keys: Sequence[BlockKey]) -> None:
    for key in keys:
        spans = (Span(Part(0, 0), 0, 1),)
        grant = node.run(
            node.store.puts.reserve(
                DAEMON_SESSION, SPEC.id, [key], first_block=0, parent=None, spans=spans
            )
        )
        sums = [checksum(node.store.view(slot)) for slot in grant.slots if slot is not None]
        node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))


def chunk(node: Node, lender: StoreLender, ask: HeadsAsk) -> HeadsReply:
    return node.run(lender.heads(ask))


def numbers(reply: HeadsReply) -> list[int]:
    return [int(each) for each in np.frombuffer(reply.heads, "<u8")]


def snapshot(node: Node, lender: StoreLender, *, between_s: float = 0.0) -> tuple[set[int], int]:
    """Return all heads by a snapshot, and after which change to go on."""
    reply = chunk(node, lender, HeadsAsk())
    since, found = reply.since, numbers(reply)
    while reply.cursor:
        node.run(asyncio.sleep(between_s))
        reply = chunk(node, lender, HeadsAsk(reply.instance, cursor=reply.cursor))
        assert numbers(reply)[0] > found[-1]
        found += numbers(reply)
    return set(found), since


def heads(keys: Sequence[BlockKey]) -> set[int]:
    return {head_of(key) for key in keys}


def test_all_chunks_of_a_snapshot_are_cut_from_what_was_sorted_once(node: Node) -> None:
    put(node, KEYS)
    lender = node.store.lender("1" * 16)
    assert snapshot(node, lender, between_s=KEPT_S / 2)[0] == heads(KEYS)
    assert lender._snapshots.sorted == 1
    assert snapshot(node, lender)[0] == heads(KEYS)  # nothing has changed since
    assert lender._snapshots.sorted == 1


def test_hosts_that_ask_at_once_share_it(node: Node) -> None:
    put(node, KEYS)
    lender = node.store.lender("1" * 16)

    async def both() -> None:
        first, second, gone = (asyncio.ensure_future(lender.heads(HeadsAsk())) for _ in range(3))
        await asyncio.sleep(0)
        gone.cancel()
        assert (await first).heads == (await second).heads

    node.run(both())
    assert lender._snapshots.sorted == 1


def test_what_changes_meanwhile_is_told_after_it(node: Node) -> None:
    put(node, KEYS[:60])
    lender = node.store.lender("1" * 16)
    first = chunk(node, lender, HeadsAsk())
    put(node, KEYS[60:])
    node.run(node.store.deletes.delete(SPEC.id, KEYS[:10]))
    found, since = snapshot(node, lender)  # by another host: what was sorted is new enough
    assert lender._snapshots.sorted == 1
    assert since == first.since
    changes = chunk(node, lender, HeadsAsk(first.instance, since=since))
    for head, came in zip(numbers(changes), changes.came, strict=True):
        (found.add if came else found.discard)(head)
    assert found == heads(KEYS[10:])


def test_who_begins_gets_none_that_is_old_and_none_is_kept(node: Node) -> None:
    put(node, KEYS[:60])
    lender = node.store.lender("1" * 16)
    snapshot(node, lender)
    put(node, KEYS[60:])
    node.run(asyncio.sleep(SHARED_S))
    assert snapshot(node, lender)[0] == heads(KEYS)
    assert lender._snapshots.sorted == 2
    node.run(asyncio.sleep(2 * KEPT_S))
    assert not lender._snapshots._kept


def test_a_level_has_one_of_its_own(node: Node) -> None:
    put(node, KEYS)
    lender = node.store.lender("1" * 16)
    assert snapshot(node, lender)[0] == heads(KEYS)
    assert numbers(chunk(node, lender, HeadsAsk(level=1))) == []  # each is the first of its prefix


def test_what_is_older_than_the_changes_that_are_kept_is_of_no_use(node: Node) -> None:
    put(node, KEYS)
    lender = node.store.lender("1" * 16)
    reply = chunk(node, lender, HeadsAsk())
    lender._heads._changes.clear()
    put(node, sample_keys("more", 1))
    lender._heads._changes.clear()
    chunk(node, lender, HeadsAsk(reply.instance, cursor=reply.cursor))
    assert lender._snapshots.sorted == 2
