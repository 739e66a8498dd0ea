"""What is written to the file tier, and when: on demotion, on second use, within a budget."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Span
from kvstore.model.errors import InvalidRequest
from kvstore.move.losses import TOLD_S
from kvstore.replay import node as replay_node
from kvstore.settings import ADMISSIONS
from kvstore.testing.disks import FaultyDisk
from tests.decide.planner.spaces import at_once
from tests.store.node import FULL, RECORD, SPEC, Node, chain

A, B = chain(1), chain(2)
BLOCK = 12_288 + 4096  # of the arena, by a block with both of its parts


def test_what_is_written_on_demotion_alone_is_written_when_it_must_leave(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10, write_on_demotion=True) as node:
        node.put(A, 0, 16, parts=(FULL,))
        node.run(asyncio.sleep(0.05))
        assert not node.planner.stored.framed
        assert node.put(B, 0, 16, parts=(FULL,), wait_s=5.0).refused == 0
        lost = node.store.report.stats()["dram"]["lost_records"]
        assert (lost, node.planner.stored.framed > 0) == (0, True)
        assert (
            sum(item.key in A for item in node.run(node.store.report.scan(None, None, 100))) == 16
        )


def test_what_is_written_on_second_use_alone_is_written_when_it_is_used_or_put_again(
    tmp_path: Path,
) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10, write_on_second_use=True) as node:
        node.put(A, 0, 16, parts=(FULL,))
        node.run(asyncio.sleep(0.05))
        assert not node.planner.stored.framed
        node.planner.touch(A[:4])
        node.write_behind.wake()
        node.run(asyncio.sleep(0.05))
        assert node.planner.stored.framed == 4
        node.put(B, 0, 16, parts=(FULL,))  # A[5:] leaves the arena, and for good
        assert node.planner.stored.framed == 4
        node.planner.touch(A[:8])
        node.put(A, 5, 8, parts=(FULL,))
        node.run(asyncio.sleep(0.05))
        assert node.planner.stored.framed == 8


def test_a_write_budget_keeps_starts_of_prefixes_and_a_restart_is_no_new_one(
    tmp_path: Path,
) -> None:
    per_day = 48 * 8 * RECORD  # half an hour of it is eight records
    with Node(tmp_path / "kv", write_bytes_per_day=per_day) as node:
        node.put(A, 0, 16, parts=(FULL,))
        for _ in range(2):
            assert not node.flush(), "not all of it is durable"
        assert node.planner.stored.framed == 8
    with Node(tmp_path / "kv", write_bytes_per_day=per_day) as node:
        node.get(A[:8], spans=(Span(FULL, 0, 8),))
        assert node.planner.stored.framed == 8
        node.put(B, 0, 4, parts=(FULL,))
        assert not node.flush()
        assert node.planner.stored.framed == 8
        node.time += 3600
        node.planner.touch(B[:4])
        assert node.flush()
        assert node.planner.stored.framed == 12


def test_what_a_budget_kept_out_is_written_by_a_flush_once_there_is_none(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=4 << 20, write_bytes_per_day=1) as node:
        node.put(A, 0, 4, parts=(FULL,))
        assert not node.flush()
        node.planner.admission.set_budget(0)
        assert node.flush()
        assert node.planner.stored.framed == 4


def test_copies_of_other_hosts_are_no_reason_to_say_not_durable(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=4 << 20, write_bytes_per_day=1) as node:
        node.put(A, 0, 4, parts=(FULL,))
        assert not node.flush(), "not all of it is durable"
        for key in A[:4]:
            node.planner.admission.copied(key)
        assert node.flush()


@pytest.mark.parametrize("admission", ["write_on_demotion", "write_on_second_use"])
def test_a_durable_commit_and_a_flush_write_what_nobody_else_would(
    tmp_path: Path, admission: str
) -> None:
    with Node(tmp_path / "kv", **{admission: True}) as node:
        assert node.put(A, 0, 4, durable=True).durable
        node.put(B, 0, 4)
        assert node.flush()
    with Node(tmp_path / "kv") as node:
        assert (node.get(A), node.get(B)) == (4, 4)


def test_a_flush_does_not_pass_over_what_was_lost_before_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path / "kv", arena_bytes=256 << 10, disk=disk) as node:
        disk.budget_nbytes = 0
        node.put(A, 0, 16, parts=(FULL,))
        assert not node.flush()
        node.put(B, 0, 16, parts=(FULL,))  # makes room for itself
        disk.budget_nbytes = None
        for _ in range(3):  # every client that asks is told, for a while
            assert not node.flush()
        assert node.store.report.stats()["dram"]["lost_records"] > 0
        after(node, TOLD_S)
        assert node.flush()


def test_a_flush_does_not_pass_over_what_the_write_budget_kept_out_and_left(
    tmp_path: Path,
) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10, write_bytes_per_day=1) as node:
        node.put(A, 0, 16, parts=(FULL,))
        node.put(B, 0, 16, parts=(FULL,))
        node.run(node.store.deletes.delete(SPEC.id, B))
        for _ in range(2):
            assert not node.flush(), "it is in the arena"
        node.run(node.store.deletes.delete(SPEC.id, A))
        assert not node.flush(), "the rest has left"
        after(node, TOLD_S)
        assert node.flush()


def put_after(node: Node, *blocks: tuple[BlockKey, BlockKey]) -> None:
    """Put blocks with their parents, which may be wrong."""
    grants = [
        node.run(
            node.store.puts.reserve(
                DAEMON_SESSION,
                SPEC.id,
                [key],
                first_block=1,
                parent=parent,
                spans=(Span(FULL, 0, 1),),
            )
        )
        for key, parent in blocks
    ]
    for grant in grants:
        node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, [0]))


def test_parents_that_name_each_other_hold_up_nobody(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", write_on_demotion=True, write_bytes_per_day=1 << 40) as node:
        put_after(node, (A[0], A[1]), (A[1], A[0]))
        node.run(node.store.keep_house())
        assert at_once(node.planner.admission.offer_all()), "they have no start in the file tier"


def test_a_block_cannot_be_its_own_parent(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node, pytest.raises(InvalidRequest, match="one of the keys"):
        put_after(node, (A[0], A[0]))


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_a_prefix_of_the_file_tier_is_promoted_whole_though_others_must_be_written_first(
    tmp_path: Path, admission: str
) -> None:
    options = {f"write_on_{admission}": True} if admission != "all" else {}
    with Node(tmp_path / "kv", arena_bytes=160 * BLOCK, **options) as node:
        prefixes = [chain(name, 40) for name in range(6)]
        replayed = replay_node.Node(
            replay_node.Setup(dram_blocks=160, file_blocks=1000, admission=admission), 2
        )
        for keys in prefixes:
            for _ in range(2 if admission == "second_use" else 1):
                replayed.ask(keys)
            node.time += 10
            node.put(keys, wait_s=5.0)
            if admission == "second_use":
                node.planner.touch(keys)
                node.write_behind.wake()
            for _ in range(10):
                node.run(node.store.keep_house())
            node.until(lambda: not node.planner.dirty.count)
        match = node.planner.match(SPEC.id, prefixes[0])
        assert match.resident_blocks < match.hit_blocks == 40
        assert node.get(prefixes[0], wait_s=10.0) == replayed.ask(prefixes[0]) == 40


def after(node: Node, seconds: float) -> None:
    """Let a node tell of losses as if it was later."""
    losses, now = node.write_behind._losses, node.now
    losses._now = lambda: now() + seconds


def test_a_flush_is_not_troubled_by_what_left_the_file_tier_first(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=2 << 20, file_bytes=1 << 20) as node:
        for name in range(20):
            assert node.put(chain(name), 0, 12, durable=True, wait_s=5.0).durable
        assert node.store.report.stats()["dram"]["lost_records"] > 0
        assert node.flush()
