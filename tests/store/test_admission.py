"""What is written to the file tier, and when: on demotion, on second use, within a budget."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.model.block import Span
from kvstore.move.losses import TOLD_S
from kvstore.testing.disks import FaultyDisk
from tests.store.node import FULL, RECORD, SPEC, Node, chain

A, B = chain(1), chain(2)


def test_what_is_written_on_demotion_alone_is_written_when_it_must_leave(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10, write_on_demotion=True) as node:
        node.put(A, 0, 16, parts=(FULL,))
        node.run(asyncio.sleep(0.05))
        assert not node.planner.stored.framed
        assert node.put(B, 0, 16, parts=(FULL,), wait_s=5.0).refused == 0
        lost = node.store.report.stats()["dram"]["lost_records"]
        assert (lost, node.planner.stored.framed > 0) == (0, True)
        assert sum(item.key in A for item in node.store.report.scan(None, None, 100)) == 16


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
