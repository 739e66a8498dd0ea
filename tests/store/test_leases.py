"""Leases of one store: how much they may hold, and what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.decide import resting
from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Grant, NamespaceId, Span
from tests.store.node import FULL, SPEC, Node, chain

A, B = chain(1), chain(2)


def test_beyond_half_of_the_arena_the_answer_is_an_estimate() -> None:
    with Node(None, arena_bytes=1 << 20) as node:
        node.put(A, 0, 24)
        node.put(B, 0, 24)
        first = node.acquire(A)
        assert first.leased
        second = node.acquire(B)
        assert (second.leased, second.hit_blocks, second.slots) == (False, 24, ())
        node.store.release(DAEMON_SESSION, [first.lease_id])
        assert node.get(B) == 24


def test_a_leased_slot_is_not_reused_by_deleting_its_block() -> None:
    with Node(None) as node:
        node.put(A, 0, 4)
        grant = node.acquire(A)
        node.run(node.store.deletes.delete(SPEC.id, A))
        node.put(B, 0, 24)
        assert node.store.view(grant.slots[0])[:4] != b""
        used = set(grant.slots)
        assert not used & set(node.acquire(B).slots)


def test_named_parts_are_leased_whatever_the_match_rules_say() -> None:
    with Node(None) as node:
        node.put(A, 3, 5, parts=[FULL])
        grant = node.acquire(A, spans=(Span(FULL, 0, 6),))
        assert [slot is not None for slot in grant.slots] == [False] * 3 + [True] * 2 + [False]


def test_a_deadline_passed_before_the_bytes_are_up_gives_the_resident_prefix(
    tmp_path: Path,
) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 10, durable=True)
    with Node(tmp_path / "kv") as node:
        grant = node.acquire(A, wait_s=0.0)
        assert grant.hit_blocks == 0
        assert node.get(A) == 10


def test_leases_granted_at_once_stay_under_half_of_the_arena(tmp_path: Path) -> None:
    """All pass the bound before their bytes are up; it holds when they are leased, too."""
    chains = [chain(name, 8) for name in range(1, 13)]
    with Node(tmp_path / "kv") as node:
        for keys in chains:
            node.put(keys, 0, 8, durable=True)
    with Node(tmp_path / "kv", arena_bytes=1 << 20) as node:

        async def all_at_once() -> list[Grant]:
            acquire = node.store.gets.acquire
            return await asyncio.gather(
                *(acquire(DAEMON_SESSION, SPEC.id, keys, wait_s=5.0) for keys in chains)
            )

        grants = node.run(all_at_once())
        assert any(grant.slots for grant in grants)
        assert any(not grant.leased and grant.hit_blocks for grant in grants)
        assert node.store.report.stats()["dram"]["leased_bytes"] <= 1 << 19
        grant = node.acquire(chains[0], spans=(Span(FULL, 0, 8),))
        assert node.store.report.stats()["dram"]["leased_bytes"] <= 1 << 19
        node.store.release(DAEMON_SESSION, [grant.lease_id, *(g.lease_id for g in grants)])
        assert node.store.report.stats()["dram"]["leased_bytes"] == 0


@pytest.mark.parametrize("stored", [True, False])
def test_blocks_are_looked_up_only_to_be_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """What is looked up and rests becomes an object again, in the daemon's loop."""
    with Node(tmp_path / "kv") as node:
        if stored:
            node.put(A)
        looked_up = []
        find = node.planner.index.find

        def counted(namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> object:
            looked_up.append(len(keys))
            return find(namespace_id, keys)

        monkeypatch.setattr(node.planner.index, "find", counted)
        assert node.acquire(A).hit_blocks == (len(A) if stored else 0)
        assert [count for count in looked_up if count] == ([len(A)] if stored else [])


def test_what_was_served_rests_again_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "AWAKE_MAX", 4)
    with Node(None) as node:
        node.put(A, 0, 24)
        node.put(B, 0, 24)
        node.planner.index.rest()
        node.store.release(DAEMON_SESSION, [node.acquire(A).lease_id])
        assert len(node.planner.index._blocks.awake) == 24, "this test would not see them"
        grant = node.acquire(B)
        node.run(asyncio.sleep(0))
        node.run(asyncio.sleep(0))
        assert len(node.planner.index._blocks.awake) == 24, "those that are leased now"
        node.store.release(DAEMON_SESSION, [grant.lease_id])
