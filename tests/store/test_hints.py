"""Hints: each does what it says and reports it, within its bounds; a wrong one costs hits alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from kvstore.model.block import BlockKey
from kvstore.model.errors import InvalidRequest
from kvstore.model.hint import Hint, HintKind, Short
from kvstore.store.hints import LEAD_S
from kvstore.store.store import HOUSEKEEPING_S
from tests.sim.loop import SimLoop
from tests.store.node import FULL, RECORD, SPEC, WINDOW, Node, chain

A, B, C = chain(1), chain(2), chain(3)
ARENA = 256 << 10
BLOCK = 12_288 + 4096  # of the arena, by a block with both of its parts
PIN_MAX = ARENA // 4 // BLOCK


def resident(node: Node, keys: list[BlockKey]) -> int:
    return node.planner.match(SPEC.id, keys).resident_blocks


def crowd(node: Node, name: int = 7) -> None:
    """Put more than the arena has room for."""
    for each in (name, name + 1):
        for begin in range(0, 24, 4):
            node.put(chain(each), begin, begin + 4, durable=True)


def test_what_is_pinned_stays_until_its_time_is_over(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        node.put(A, 0, PIN_MAX, durable=True)
        report = node.hint(HintKind.PIN, A[:PIN_MAX], seconds=60)
        assert (report.blocks, report.done_blocks, report.short) == (PIN_MAX, PIN_MAX, "")
        assert report.done_bytes == node.planner.pins.nbytes == PIN_MAX * BLOCK
        assert report.lasts_s == 60
        crowd(node)
        assert resident(node, A) == PIN_MAX
        assert node.planner.pins.expire(float("inf")) == 1
        crowd(node, 9)
        assert resident(node, A) == 0
        assert node.get(A) == PIN_MAX


def test_pins_hold_no_more_than_their_share_and_no_longer_than_they_may(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA, pin_ttl_max_s=5.0) as node:
        for keys in (A, B):
            node.put(keys, 0, 4, durable=True)
        first = node.hint(HintKind.PIN, A[:4], seconds=1e9, bytes_max=3 * BLOCK)
        assert (first.done_blocks, first.short, first.lasts_s) == (3, Short.CAP, 5.0)
        second = node.hint(HintKind.PIN, B[:4], seconds=10)
        assert (second.done_blocks, second.short) == (PIN_MAX - 3, Short.CAP)
        assert node.store.report.stats()["dram"]["pinned_bytes"] == PIN_MAX * BLOCK
        assert node.hint(HintKind.PIN, A[:4], seconds=0).done_blocks == 0
        assert node.hint(HintKind.PIN, B[:4], seconds=10).done_blocks == 4


def test_a_pin_of_what_another_pin_holds_costs_nothing_more(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        node.put(A, 0, PIN_MAX, durable=True)
        for session in ("one", "two"):
            report = node.hint(HintKind.PIN, A[:PIN_MAX], session, 60)
            assert report.done_blocks == PIN_MAX
        assert node.planner.pins.nbytes == PIN_MAX * BLOCK
        node.hint(HintKind.PIN, (), "one", 0)
        crowd(node)
        assert resident(node, A) == PIN_MAX


def test_a_pin_brings_up_what_is_in_the_file_tier(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        node.put(A, 0, PIN_MAX, durable=True)
        crowd(node)
        assert resident(node, A) == 0
        assert node.hint(HintKind.PIN, A[:PIN_MAX], seconds=60).done_blocks == PIN_MAX
        crowd(node)
        assert resident(node, A) == PIN_MAX


def test_what_is_deleted_is_gone_at_once_and_its_pin_gives_the_room_back(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        node.put(A, 0, 4, durable=True)
        node.hint(HintKind.PIN, A[:4], seconds=60)
        node.run(node.store.deletes.delete(SPEC.id, A[1:4]))
        assert node.get(A) == 1
        node.planner.pins.expire(0.0)
        assert node.planner.pins.nbytes == BLOCK == node.arena.physical_nbytes


def test_many_old_pinned_blocks_do_not_stand_in_the_way_of_a_put(tmp_path: Path) -> None:
    long = chain(5, 5000)
    with Node(None, arena_bytes=64 << 20, pinned_fraction=0.9) as node:
        for begin in range(0, 3000, 500):
            node.put(long, begin, begin + 500)
        assert node.hint(HintKind.PIN, long[:3000], seconds=60).done_blocks == 3000
        for name in range(10, 40):
            assert node.put(chain(name, 40), 0, 40).refused == 0
        assert resident(node, long) == 3000


def test_a_prefetch_brings_blocks_up_and_says_how_many(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        node.put(A, 0, 6, durable=True)
        crowd(node)
        assert resident(node, A) == 0
        report = node.hint(HintKind.PREFETCH, A[:10])
        assert (report.blocks, report.done_blocks, report.short) == (6, 6, "")
        assert report.done_bytes > 6 * RECORD
        assert resident(node, A) == 6
        assert node.hint(HintKind.PREFETCH, A[:10]).done_blocks == 0


def test_a_prefetch_takes_no_more_of_the_arena_than_a_lease_may(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        for begin in range(0, 24, 4):
            node.put(A, begin, begin + 4, durable=True)
        crowd(node)
        report = node.hint(HintKind.PREFETCH, A)
        assert report.short == Short.CAP
        assert 0 < report.done_bytes <= ARENA // 2


def test_a_demoted_session_leaves_the_arena_and_comes_back_from_disk(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 6)
        report = node.hint(HintKind.DEMOTE, A[:6])
        assert (report.done_blocks, report.short) == (6, "")
        assert node.planner.stored.resident == 0
        assert node.get(A) == 6


def test_what_others_use_too_is_not_demoted(tmp_path: Path) -> None:
    other = [*A[:3], *B[:3]]
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 6, durable=True)
        node.put(other, 3, 6, durable=True)
        report = node.hint(HintKind.DEMOTE, A[:6])
        assert (report.done_blocks, report.short) == (3, Short.SHARED)
        assert resident(node, other) == 6


@pytest.mark.parametrize("kept", [None, "kv"])
def test_a_demotion_that_would_lose_a_block_is_none(tmp_path: Path, kept: str | None) -> None:
    with Node(tmp_path / kept if kept else None, write_on_demotion=True) as node:
        node.put(A, 0, 6)
        report = node.hint(HintKind.DEMOTE, A[:6])
        assert node.store.report.stats()["dram"]["lost_records"] == 0
        assert node.get(A) == 6
        assert (report.done_blocks, report.short) == ((6, "") if kept else (0, Short.NO_FILE_TIER))


def test_a_session_is_known_by_what_it_asked_for_and_put(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 6, session_id="s")
        grant = node.acquire(A[:4], session_id="s")
        node.store.release(0, [grant.lease_id])  # type: ignore[arg-type]
        node.put(A, 6, 8, session_id="s")  # its answer goes on behind the prompt
        assert node.hint(HintKind.EXPECT, (), "s", 5.0).blocks == 4
        node.put(A, 4, 8, session_id="s")
        report = node.hint(HintKind.END, (), "s")
        assert (report.blocks, report.done_blocks) == (8, 8)


def test_what_a_session_puts_after_its_end_has_ended_too(tmp_path: Path) -> None:
    ended: list[int] = []
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 4, session_id="s")
        end = node.planner.end
        node.planner.end = lambda keys: ended.append(len(keys)) or end(keys)  # type: ignore
        node.hint(HintKind.END, (), "s")
        node.put(A, 4, 6, session_id="s")
        assert ended == [4, 6]
        grant = node.acquire(A[:6], session_id="s")  # it was not over
        node.store.release(0, [grant.lease_id])  # type: ignore[arg-type]
        node.put(A, 6, 8, session_id="s")
        assert ended == [4, 6]


def test_a_pinned_session_pins_what_it_puts_later(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=ARENA) as node:
        node.put(A, 0, 2, session_id="s")
        assert node.hint(HintKind.PIN, (), "s", 60).done_blocks == 2
        node.put(A, 2, 4, session_id="s")
        crowd(node)
        assert resident(node, A) == 4


def test_a_pinned_session_that_goes_on_is_not_pinned_all_anew_by_each_commit(
    tmp_path: Path,
) -> None:
    long = chain(4, 96)
    with Node(tmp_path / "kv", arena_bytes=8 << 20, pinned_fraction=0.9) as node:
        node.put(long, 0, 4, session_id="s")
        node.hint(HintKind.PIN, (), "s", 60)
        held: list[BlockKey] = []
        hold = node.planner.policies.dram.hold
        node.planner.policies.dram.hold = lambda keys: held.extend(keys) or hold(keys)  # type: ignore
        for begin in range(4, 96, 4):  # each part by a writer of its own
            for part in (FULL, WINDOW):
                node.put(long, begin, begin + 4, parts=(part,), session_id="s")
        assert held == long[4:]
        assert node.planner.pins.nbytes == 96 * BLOCK
        node.run(node.store.deletes.delete(SPEC.id, long[90:]))
        node.put(long, 90, 92, session_id="s")
        assert node.planner.pins.nbytes == 92 * BLOCK
        assert node.hint(HintKind.PIN, (), "s", 0).done_blocks == 0
        assert node.planner.pins.nbytes == 0
        assert not node.planner.policies.dram._held  # type: ignore[attr-defined]


def test_a_session_nobody_has_heard_of_is_told_so(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        for kind in HintKind:
            report = node.hint(kind, (), "nobody", 1.0)
            assert (report.kind, report.short) == (kind, Short.UNKNOWN_SESSION)
            assert node.hint(kind, C, "", 1.0).short in (Short.NOT_STORED, Short.NO_FILE_TIER)
        counted = node.metrics.hints.labels("pin", "unknown_session")._value.get()
        assert counted == 1


def test_what_is_expected_is_in_the_arena_by_then(tmp_path: Path) -> None:
    loop = SimLoop(Random(0))
    with Node(tmp_path / "kv", arena_bytes=ARENA, loop=loop) as node:
        node.put(A, 0, 6, durable=True, session_id="s")
        crowd(node)
        report = node.hint(HintKind.EXPECT, (), "s", LEAD_S + 20)
        assert (report.done_blocks, report.lasts_s) == (6, LEAD_S + 20)
        node.run(asyncio.sleep(15))
        assert resident(node, A) == 0
        node.run(asyncio.sleep(5 + 2 * HOUSEKEEPING_S))
        assert resident(node, A) == 6


def test_a_hint_about_an_unknown_namespace_is_refused(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        hint = Hint(kind=HintKind.PIN, namespace_id=b"x" * 32, keys=A[:1], seconds=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            node.run(node.store.hints.carry_out(hint))
