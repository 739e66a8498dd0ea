"""The event loop's side, in a real store, with a publisher and a router that listens."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import time
from collections.abc import Iterator, Sequence

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.events import publisher as publisher_module
from kvstore.events.feed import STEP_BLOCKS, Feed
from kvstore.events.publisher import Publisher
from kvstore.model.block import BlockKey
from tests.events.consumer import Subscriber
from tests.store.node import SPEC, Node, chain
from tests.store.turns import TINY, CountedLoop, counting, fill

KEYS = chain(1)


@contextlib.contextmanager
def announcing(node: Node, *, engines: bool = False) -> Iterator[tuple[Feed, Subscriber]]:
    """Announce what a node holds to a router."""
    feed = Feed(
        node.store.announce(None),
        node.store.sessions,
        node.metrics,
        model="",
        engines=engines,
        recalling=lambda: False,
    )
    publisher = Publisher(
        "tcp://127.0.0.1:0",
        "",
        own=None if engines else 1000,
        first=1,
        batches_max=100,
        used=lambda number: None,
        ask=feed.ask,
        metrics=node.metrics,
    )
    publisher.start()

    async def start() -> None:
        feed.start(publisher)

    node.run(start())
    try:
        with Subscriber(publisher.publish) as router:
            if not engines:
                node.until(lambda: publisher.streams[b""].joined == 1)
            yield feed, router
    finally:
        feed.close()
        publisher.close()


def tell(feed: Feed, keys: Sequence[BlockKey]) -> None:
    """Tell the tokens of a prefix, as the call does that reserves it."""
    tokens = struct.pack(f"<{2 * len(keys)}I", *range(2 * len(keys)))
    feed.tokens(
        DAEMON_SESSION,
        SPEC.id,
        b"".join(keys),
        parent=None,
        tokens=tokens,
        lora_name="",
        stored=False,
    )


def are(router: Subscriber, keys: Sequence[BlockKey]) -> bool:
    """Say whether the router believes these blocks, and no others, to be in the arena."""
    numbers = [int.from_bytes(key[:8], "little") for key in keys]
    return router.index.where == {number: {"CPU"} for number in numbers}


def reads(node: Node, router: Subscriber, keys: Sequence[BlockKey]) -> None:
    """Wait until the router believes what is so."""

    def equal() -> bool:
        router.read(wait_s=0)
        return are(router, keys)

    node.until(equal)


def drops(node: Node) -> float:
    return node.metrics.event_drops.labels("queue")._value.get()


def test_what_a_full_publisher_did_not_take_is_told_as_it_is_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Node(None) as node, announcing(node) as (feed, router):
        tell(feed, KEYS[:6])
        node.put(KEYS[:6])
        reads(node, router, KEYS[:6])
        with monkeypatch.context() as full:
            full.setattr(publisher_module, "QUEUE_NBYTES_MAX", 0)
            node.run(node.store.deletes.delete(SPEC.id, KEYS[3:6]))
            node.until(lambda: drops(node) > 0)
            node.put(KEYS[:4], 3)  # one of them is there again, before anybody was told
            before = drops(node)
            node.until(lambda: drops(node) > before)
            assert len(feed.changed) == 3
            assert are(router, KEYS[:6])
        reads(node, router, KEYS[:4])
        node.until(lambda: not len(feed.changed))


def test_what_waits_to_be_told_is_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks rest, and leave, while nobody looks; none is made anew to be told."""
    monkeypatch.setattr("kvstore.decide.resting.AWAKE_MAX", 0)
    with Node(None) as node, announcing(node) as (feed, router):
        index = node.planner.index
        feed._looked_at = time.monotonic() + 3600  # not while we look
        tell(feed, KEYS[:8])
        node.put(KEYS[:8])
        index.rest()
        assert len(feed.changed) == 8
        assert not index._blocks.awake
        node.run(node.store.deletes.delete(SPEC.id, KEYS[6:8]))
        index.rest()
        assert len(feed.changed) == 8
        feed._look()
        assert not index._blocks.awake
        reads(node, router, KEYS[:6])


def test_who_asks_in_the_name_of_another_namespace_hides_nothing() -> None:
    other = dataclasses.replace(SPEC, identity=(("model", "other"),))
    with Node(None) as node, announcing(node) as (feed, router):
        node.planner.index.register(other)
        tell(feed, KEYS[:6])
        node.put(KEYS[:6])
        feed._ask(other.id, b"".join(KEYS[:6]))  # before anybody looked
        reads(node, router, KEYS[:6])
        node.run(node.store.deletes.delete(SPEC.id, KEYS[3:6]))
        feed._ask(other.id, b"".join(KEYS[:6]))
        reads(node, router, KEYS[:3])


def test_blocks_of_an_earlier_life_are_looked_at_and_stay_at_rest() -> None:
    with Node(None) as node:
        node.put(KEYS[:8])
        index = node.planner.index
        index.rest()
        with announcing(node, engines=True) as (feed, _):
            publisher = feed._publisher
            assert publisher is not None
            node.until(lambda: [space.gone_count for space in publisher.book.spaces] == [8])
            assert not index._blocks.awake


def test_a_feed_that_begins_looks_at_few_blocks_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, blocks = CountedLoop(), 5000
    with Node(None, arena_bytes=32 << 20, loop=loop) as node:
        fill(node, TINY, blocks)
        with counting(loop, monkeypatch):
            loop.turns.clear()
            with announcing(node, engines=True) as (feed, _):
                publisher = feed._publisher
                assert publisher is not None
                node.until(lambda: [each.gone_count for each in publisher.book.spaces] == [blocks])
        assert max(loop.turns) <= 2 * STEP_BLOCKS < blocks <= sum(loop.turns)
