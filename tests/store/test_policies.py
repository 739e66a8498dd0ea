"""A node tells which order its tiers follow, and goes on without a policy that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey
from tests.store.node import FULL, SPEC, Node, chain

A, B = chain(1), chain(2)


def metric(node: Node, name: str, **labels: str) -> float | None:
    return node.metrics.registry.get_sample_value(f"kvstore_{name}", labels)


def test_stats_and_metrics_tell_the_order_that_each_tier_follows() -> None:
    with Node(None, policy="hz") as node:
        node.put(A, 0, 16, parts=(FULL,))
        node.get(A[:16])
        policies = node.store.report.stats()["policies"]
        assert policies["dram"]["follows"] in ("hz", "lru")
        assert policies["dram"]["failures"] == 0
        assert policies["dram"]["shadow_hit_ratios"].keys() == {"hz", "lru"}
        node.metrics.publish(node.store.report.stats(), node.planner.counts.left)
        follows = policies["dram"]["follows"]
        assert metric(node, "policy_follows", tier="dram", order=follows) == 1.0
    with Node(None, policy="lru") as node:
        assert node.store.report.stats()["policies"]["dram"] == {"failures": 0}


@pytest.mark.parametrize("method", ["touch", "insert", "remove", "victims"])
def test_a_policy_that_raises_gives_way_and_every_put_and_get_goes_on(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Node(None, arena_bytes=256 << 10, policy="hz") as node:
        node.put(A, 0, 8, parts=(FULL,))

        def raises(*args: object) -> None:
            raise ZeroDivisionError

        with caplog.at_level(logging.ERROR):
            setattr(node.planner.policies.dram._policy, method, raises)
            assert node.get(A[:8]) == 0, "one of its groups is missing"
            assert node.put(B, 0, 16, parts=(FULL,)).refused == 0
            assert node.put(chain(3), 0, 16, parts=(FULL,)).refused == 0
        assert "tier=dram policy=failed now=lru" in caplog.text
        stats = node.store.report.stats()
        assert stats["policies"]["dram"] == {"failures": 1}
        assert stats["dram"]["evicted_blocks"] > 0
        for _ in range(2):
            node.metrics.publish(stats, node.planner.counts.left)
        assert metric(node, "policy_failures_total", tier="dram") == 1.0


@pytest.mark.parametrize("victim", [BlockKey(bytes(32)), 7])
def test_a_policy_that_names_what_is_not_there_gives_way_and_every_put_goes_on(
    victim: BlockKey, caplog: pytest.LogCaptureFixture
) -> None:
    with Node(None, arena_bytes=256 << 10, policy="hz") as node:
        node.put(A, 0, 8, parts=(FULL,))
        policy = node.planner.policies.dram._policy
        walk = policy.victims

        def victims() -> Iterator[BlockKey]:
            yield victim
            yield from walk()

        with caplog.at_level(logging.ERROR):
            policy.victims = victims  # type: ignore[method-assign]
            for number in range(2, 6):
                assert node.put(chain(number), 0, 16, parts=(FULL,)).refused == 0
        assert "tier=dram policy=failed now=lru" in caplog.text
        assert not any(key.hex()[:16] in caplog.text for key in A)
        stats = node.store.report.stats()
        assert stats["policies"]["dram"] == {"failures": 1}
        assert stats["dram"]["evicted_blocks"] > 0


def test_a_policy_that_names_a_block_twice_gives_way() -> None:
    with Node(None, policy="hz") as node:
        node.put(A, 0, 8, parts=(FULL,))
        policy, eviction = node.planner.policies.dram._policy, node.planner.eviction
        walk = policy.victims
        policy.victims = lambda: (key for key in walk() for _ in range(2))  # type: ignore[method-assign]
        nbytes = node.store.report.stats()["dram"]["used_bytes"]
        assert eviction.shed(nbytes) == nbytes
        assert node.store.report.stats()["dram"]["blocks"] == 0
        assert node.planner.policies.failures["dram"] == 1


def test_a_policy_of_files_that_names_what_is_not_there_gives_way(tmp_path: Path) -> None:
    with Node(tmp_path, file_bytes=4 << 20) as node:
        node.put(A, 0, 16, durable=True)
        planner = node.planner
        policy = planner.policies.file._policy
        here = list(policy.victims())
        assert here
        policy.victims = lambda: iter([BlockKey(bytes(32))] * 9000)  # type: ignore[method-assign]

        async def evict() -> int:
            return planner.eviction.evict_file(4096)

        assert node.run(evict()) > 0
        assert planner.policies.failures == {"dram": 0, "file": 1}


def test_who_names_a_block_twice_in_a_prefix_does_not_end_the_policy(tmp_path: Path) -> None:
    with Node(tmp_path, policy="hz") as node:
        node.put(A, 0, 8, durable=True)
        blocks, nbytes, unwritten = node.planner.eviction.demote_prefix([*A[:8], A[7]])
        assert (blocks, unwritten) == (8, False)
        assert nbytes > 0
        assert node.planner.policies.failures["dram"] == 0


def test_a_policy_that_names_others_blocks_as_of_one_session_alone_gives_way() -> None:
    with Node(None, policy="hz") as node:
        node.put(A, 0, 8, parts=(FULL,))
        policy = node.planner.policies.dram._policy
        policy.alone = lambda prefix: [*prefix, BlockKey(bytes(32))]  # type: ignore[method-assign]
        assert node.planner.eviction.demote_prefix(A[:8]) == (0, 0, False)
        assert node.planner.policies.failures["dram"] == 1


def test_what_an_engine_says_that_a_block_costs_is_known_of_its_namespace() -> None:
    with Node(None, policy="hz") as node:
        node.put(A, 0, 16)
        node.get(A[:16], recompute_s_per_block=0.5)
        assert node.planner.costs.levels == {SPEC.id: 0}


def test_an_acquire_is_answered_before_the_policies_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    with Node(None, policy="hz") as node:
        node.put(A, 0, 16)
        touch = node.planner.touch
        monkeypatch.setattr(
            node.planner, "touch", lambda *args: [order.append("told"), touch(*args)]
        )

        async def ask() -> None:
            grant = await node.store.gets.acquire(DAEMON_SESSION, SPEC.id, A[:16])
            assert grant.hit_blocks == 16
            order.append("answered")

        node.run(ask())
        node.run(asyncio.sleep(0))
    assert order == ["answered", "told"]
