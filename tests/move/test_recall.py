"""What a restart found is served at once, and indexed behind everybody's back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.move import policy_notes
from kvstore.store import report
from tests.store.node import SPEC, Node, chain

CHAINS = [chain(number) for number in range(40)]
A, B = CHAINS[:2]
LAST = CHAINS[-1]


@pytest.fixture(params=[1, 2])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """The directories of the file tier."""
    return [tmp_path / str(number) for number in range(request.param)]


def filled(paths: Sequence[Path], **options: object) -> None:
    with Node(paths, **options) as node:  # type: ignore[arg-type]
        for keys in CHAINS:
            assert node.put(keys, durable=True, wait_s=5.0).durable


def test_a_prefix_hits_before_anything_else_is_indexed(paths: list[Path]) -> None:
    filled(paths)
    with Node(paths) as node:
        before, unindexed = len(node.planner.index), node.store.report.stats()["queues"]["recall"]
        assert before < 24 * len(CHAINS) // 2
        assert node.store.gets.match(SPEC.id, LAST).hit_blocks == 24
        assert len(node.planner.index) == before + 24
        assert 0 < node.store.report.stats()["queues"]["recall"] < unindexed
        node.recall()
        assert len(node.planner.index) == 24 * len(CHAINS)
        assert all(node.get(keys) == 24 for keys in CHAINS)


def test_a_node_that_indexes_for_too_long_says_so(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(paths)
    with Node(paths) as node:
        assert node.store.report.trouble() == ""
        monkeypatch.setattr(report, "RECALL_S_MAX", 0.0)
        assert "runs found on disk are not indexed" in node.store.report.trouble()
        node.recall()
        assert node.store.report.trouble() == ""


def test_what_is_deleted_before_it_is_indexed_stays_away(paths: list[Path]) -> None:
    filled(paths)
    with Node(paths) as node:
        assert node.planner.index.get(SPEC.id, LAST[0]) is None
        assert node.run(node.store.deletes.delete(SPEC.id, LAST[5:])) == 19
        node.recall()
        assert node.get(LAST) == 5
        assert node.get(A) == 24
    with Node(paths) as node:
        assert node.get(LAST) == 5


def test_what_a_policy_has_learned_is_known_after_a_restart(tmp_path: Path) -> None:
    learned = []
    for life in range(2):
        with Node(tmp_path / "kv", policy="hz") as node:
            if not life:
                for name in range(40):
                    node.time += 10.0
                    node.put(chain(name), 0, 8, durable=True)
                    node.get(chain(name // 2))
            node.recall()
            learned.append(node.planner.save_policies())
    assert len(learned[1]) == len(learned[0]) > 2 * 68 * 40 * 8
    (tmp_path / "kv/NOTE.a").write_bytes(b"nonsense")
    with Node(tmp_path / "kv", policy="hz") as node:
        node.recall()
        assert node.get(chain(3)) == 8


def test_clearing_all_reaches_namespaces_nobody_has_asked_for(paths: list[Path]) -> None:
    filled(paths)
    node = Node(paths)
    node.run(node.store.start())
    assert [found[:2] for found in node.store.namespaces.all()] == [(SPEC.id, SPEC)]
    node.run(node.store.deletes.clear(None))
    node.recall()
    node.store.namespaces.register(SPEC)
    assert node.store.gets.match(SPEC.id, A).hit_blocks == 0
    node.__exit__()
    with Node(paths) as again:
        assert again.store.gets.match(SPEC.id, A).hit_blocks == 0


def test_putting_what_was_found_stores_nothing_new(paths: list[Path]) -> None:
    filled(paths)
    with Node(paths) as node:
        done = node.put(LAST)
        assert (done.committed, done.existing) == (0, 48)


def test_blocks_put_again_elsewhere_are_served_once(tmp_path: Path) -> None:
    """Two frames of the same records, as after an eviction whose hole the power took back."""
    filled([tmp_path])
    segments = {path: path.read_bytes() for path in tmp_path.glob("*.segment")}
    with Node(tmp_path) as node:
        node.run(node.store.deletes.delete(SPEC.id, A))
    for path in set(tmp_path.glob("*.segment")) - set(segments):
        path.unlink()  # the tombstones
    for path, content in segments.items():
        path.write_bytes(content)
    with Node(tmp_path) as node:
        node.put(A, durable=True)
        node.recall()
        assert node.get(A) == 24


def test_a_full_disk_gives_its_oldest_before_they_are_indexed(paths: list[Path]) -> None:
    nbytes = (8 << 20) // len(paths)
    filled(paths, file_bytes=nbytes)
    new = chain(99)
    with Node(paths, file_bytes=nbytes) as node:
        assert node.planner.index.get(SPEC.id, LAST[0]) is None
        assert node.put(new, durable=True).durable
        node.recall()
        assert node.get(new) == 24
        assert node.store.gets.match(SPEC.id, LAST).hit_blocks == 24


def test_nothing_leaves_for_a_cut_cap_before_all_is_indexed(paths: list[Path]) -> None:
    """What is dead is only then known not to count."""
    filled(paths)
    with Node(paths, file_bytes=(6 << 20) // len(paths)) as node:
        while node.write_behind.recall.unrecalled_runs:
            assert node.planner.counts.evicted_file == 0
            node.write_behind.wake()
            node.run(asyncio.sleep(0))
        node.recall()
        assert node.planner.counts.evicted_file > 0


def test_what_is_asked_for_first_is_more_recent_than_what_nobody_asked_for(
    paths: list[Path],
) -> None:
    nbytes = (8 << 20) // len(paths)
    filled(paths, file_bytes=nbytes)
    with Node(paths, file_bytes=nbytes) as node:
        oldest = next(
            keys for keys in CHAINS if node.store.gets.match(SPEC.id, keys).hit_blocks == 24
        )
        assert node.get(oldest) == 24
        node.recall()
        number = 100
        while node.store.gets.match(SPEC.id, LAST).hit_blocks == 24:
            assert node.put(chain(number), durable=True, wait_s=5.0).durable
            number += 1
        assert node.store.gets.match(SPEC.id, oldest).hit_blocks == 24


def test_reading_single_parts_finds_them_too(paths: list[Path]) -> None:
    filled(paths)
    with Node(paths) as node:
        grant = node.acquire(A, spans=node.acquire(B).spans)
        assert None not in grant.slots
        node.store.release(DAEMON_SESSION, [grant.lease_id])


def test_what_engines_tell_of_their_pace_is_saved_soon(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(chain(1), 0, 8, durable=True)
        node.recall()
        before = node.planner.save_policies()
        node.get(chain(1)[:8], recompute_s_per_block=0.02)
        saving = node.write_behind._policies
        began = saving._now()
        saving._now = lambda: began + policy_notes.SAVE_NEW_AFTER_S / 2
        node.run(saving.save_now_and_then())
        assert node.file is not None
        assert node.run(node.file.notes.read()) == before
        saved_at = began + 2 * policy_notes.SAVE_NEW_AFTER_S
        saving._now = lambda: saved_at
        node.run(saving.save_now_and_then())
        first = node.run(node.file.notes.read())
        assert first == node.planner.save_policies() != before
        node.planner.costs.told(replace(SPEC, identity=(("model", "another"),)), 0.02, 1)
        for later_s, is_saved in (
            (0, False),
            (policy_notes.SAVE_NEW_EVERY_S - 1, False),
            (1, True),
        ):
            saved_at += later_s
            node.run(saving.save_now_and_then())
            assert (node.run(node.file.notes.read()) != first) is is_saved
