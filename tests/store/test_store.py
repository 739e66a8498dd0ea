"""Puts, gets, deletes and scans of one store, by what a client sees."""

from __future__ import annotations

import asyncio
import errno
import struct
from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import InvalidRequest, SessionEnded
from kvstore.testing.disks import FaultyDisk
from tests.store.node import FULL, SPEC, WINDOW, Node, chain, record_bytes

A, B = chain(1), chain(2)


def test_a_prefix_comes_back_byte_for_byte() -> None:
    with Node(None) as node:
        assert node.put(A, 0, 10).committed == 20
        assert node.get(A) == 10
        assert node.get(B) == 0
        assert node.put(A, 0, 10).existing == 20


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
def test_what_is_durable_comes_back_after_a_restart(tmp_path: Path, codec: str) -> None:
    with Node(tmp_path / "kv", codec=codec) as node:
        assert node.put(A, 0, 20, durable=True).durable
    with Node(tmp_path / "kv", codec=codec) as node:
        assert node.get(A) == 20
        assert node.store.report.stats()["dram"]["blocks"] == 20


def test_a_prefix_larger_than_the_arena_comes_back_as_far_as_half_of_it(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10) as node:
        for begin in range(0, 24, 4):
            node.put(A, begin, begin + 4, durable=True)
        hit = node.get(A)
        assert 0 < hit < 24
        assert hit * (12_288 + 4096) >= 64 << 10


def test_what_left_the_arena_is_read_from_the_file_tier(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10) as node:
        for keys in (A, B):
            for begin in range(0, 12, 4):
                node.put(keys, begin, begin + 4, durable=True)
        assert node.store.report.stats()["dram"]["evicted_blocks"] > 0
        assert node.get(A[:8]) == 8
        assert node.get(B[:8]) == 8
        assert node.store.report.stats()["dram"]["lost_records"] == 0


def test_a_put_without_room_is_refused_and_counted_and_fits_once_the_rest_is_written(
    tmp_path: Path,
) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10) as node:
        first = node.put(A, 0, 24)
        assert first.refused > 0
        assert node.metrics.refusals.labels("no_room")._value.get() == first.refused
        assert node.flush()
        assert node.put(B, 0, 8).refused == 0


def test_waiting_for_room_is_bounded_and_ends_when_there_is_some(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", arena_bytes=256 << 10) as node:
        node.put(A, 0, 12)
        assert node.put(B, 0, 8, wait_s=5.0).refused == 0


def test_a_record_that_does_not_match_its_checksum_is_never_written(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        done = node.put(A, 0, 4, durable=True, damage=True)
        assert not done.durable
        assert node.acquire(A).hit_blocks == 0
        assert node.metrics.corrupt_blocks.labels("write_behind")._value.get() > 0


def test_a_rotten_frame_is_dropped_and_the_prefix_before_it_served(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 8, durable=True)
        node.put(A, 8, 16, durable=True)
    for segment in (tmp_path / "kv").glob("*.segment"):
        data = bytearray(segment.read_bytes())
        for at in range(0, len(data), 4096):
            group, _, first_block = struct.unpack_from("<III", data, at + 120)
            if data[at : at + 8] == b"KVSFRAME" and (group, first_block) == (0, 8):
                data[at + 4096 + 100] ^= 1
        segment.write_bytes(data)
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 8
        assert node.metrics.corrupt_blocks.labels("promote")._value.get() == 1
        assert node.get(A) == 8


def test_deleted_blocks_stay_away_after_a_restart(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 10, durable=True)
        assert node.run(node.store.deletes.delete(SPEC.id, A[4:6])) == 2
        assert node.get(A) == 4
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 4
        node.put(A, 4, 6, durable=True)
        assert node.get(A) == 10
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 10


def test_a_cleared_namespace_stays_empty(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 10, durable=True)
        assert node.run(node.store.deletes.clear(None)) == 10
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 0
        assert node.store.report.stats()["blocks"] == 0


def test_the_file_tier_stays_under_its_cap_and_keeps_serving(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", file_bytes=2 << 20, segment_nbytes=256 << 10) as node:
        for name in range(12):
            node.put(chain(name), 0, 24, durable=True, wait_s=5.0)
            used = sum(f.stat().st_blocks * 512 for f in (tmp_path / "kv").glob("*.segment"))
            assert used <= 2 << 20
        assert node.get(chain(11)) == 24
        assert node.store.report.stats()["file"]["evicted_blocks"] > 0


def test_bad_calls_are_refused_and_change_nothing() -> None:
    with Node(None) as node:
        store, ours = node.store, DAEMON_SESSION
        with pytest.raises(InvalidRequest, match="unknown namespace"):
            store.gets.match(bytes(32), A)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="32 bytes"):
            store.gets.match(SPEC.id, [BlockKey(b"short")])
        with pytest.raises(InvalidRequest, match="skip_blocks"):
            store.gets.match(SPEC.id, A, 25)
        with pytest.raises(InvalidRequest, match="no reservation"):
            node.run(store.puts.commit(ours, 12345, []))
        for spans in [(Span(FULL, 0, 99),), (Span(FULL, 0, 1), Span(FULL, 1, 2))]:
            with pytest.raises(InvalidRequest):
                node.acquire(A, spans=spans)
        with pytest.raises(SessionEnded):
            node.run(store.gets.acquire(77, SPEC.id, A))  # type: ignore[arg-type]
        assert store.report.stats()["leases"] == 0
        assert store.report.stats()["dram"]["used_bytes"] == 0


def test_a_commit_with_the_wrong_number_of_checksums_leaves_the_reservation_open() -> None:
    with Node(None) as node:
        reserve = node.store.puts.reserve(
            DAEMON_SESSION, SPEC.id, A[:2], first_block=0, parent=None, spans=(Span(FULL, 0, 2),)
        )
        grant = node.run(reserve)
        with pytest.raises(InvalidRequest, match="checksums"):
            node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, [1]))
        assert node.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
        assert node.store.report.stats()["dram"]["used_bytes"] == 0


def test_without_a_file_tier_nothing_is_durable_and_flush_says_so() -> None:
    with Node(None) as node:
        assert not node.put(A, 0, 4, durable=True).durable
        assert not node.flush()


def test_what_a_full_disk_refused_is_not_called_durable_and_is_written_once_there_is_room(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk()
    disk.budget_nbytes = 64 << 10
    with Node(tmp_path / "kv", disk=disk) as node:
        done = node.put(A, 0, 16, durable=True)
        assert done.committed == 32
        assert not done.durable
        assert not node.flush()
        assert node.get(A) == 16
        assert node.store.report.stats()["file"]["state"] == "failing"
        disk.budget_nbytes = None
        assert node.flush()
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 16


def test_a_block_that_left_before_the_commit_is_not_called_durable(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 4, parts=(FULL,))
        spans = (Span(FULL, 0, 16),)
        reserve = node.store.puts.reserve(
            DAEMON_SESSION, SPEC.id, A[:16], first_block=0, parent=None, spans=spans
        )
        grant = node.run(reserve)
        assert grant.slots[:5] == (None,) * 4 + grant.slots[4:5]
        node.run(node.store.deletes.delete(SPEC.id, A[:4]))
        commit = node.store.puts.commit(DAEMON_SESSION, grant.lease_id, [0] * 16, durable=True)
        done = node.run(commit)
        assert (done.committed, done.existing, done.refused) == (12, 4, 0)
        assert not done.durable


def test_making_room_for_the_end_of_a_prefix_does_not_take_its_start(tmp_path: Path) -> None:
    """The disk refused its first blocks, so the only copy of them is in the arena."""
    disk = FaultyDisk()
    with Node(tmp_path / "kv", arena_bytes=256 << 10, disk=disk) as node:
        disk.budget_nbytes = 0
        assert not node.put(A, 0, 4, parts=(FULL,), durable=True).durable
        node.put(B, 0, 16, parts=(FULL,))
        node.flush()
        disk.budget_nbytes = None
        done = node.put(A, 0, 16, parts=(FULL,))
        assert (done.committed, done.existing, done.refused) == (12, 4, 0)
        assert node.store.report.stats()["dram"]["lost_records"] > 0  # of B
        assert (
            sum(item.key in A for item in node.run(node.store.report.scan(None, None, 100))) == 16
        )


def test_a_disk_that_is_gone_is_tried_once_in_a_while_not_for_every_commit(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path / "kv", disk=disk) as node:
        attempts = []

        def gone(call: str) -> None:
            if call == "open_direct":  # not those of upkeep, which come when they come
                attempts.append(call)
            raise OSError(errno.ENOENT, "gone")

        disk.fault = gone
        assert not node.put(A, 0, 1, durable=True).durable
        assert node.store.report.stats()["file"]["state"] == "failing"
        assert node.file is not None
        node.run(node.file.settle())  # what it does in the background tries the disk, too
        before = len(attempts)
        assert before > 0
        for at in range(1, 16):
            done = node.put(A, at, at + 1, durable=True)
            assert (done.committed, done.durable) == (2, False)
        assert len(attempts) == before
        assert node.get(A) == 16
        disk.fault = None
        assert node.flush()
    with Node(tmp_path / "kv") as node:
        assert node.get(A) == 16


def test_a_large_batch_lets_others_in_between() -> None:
    with Node(None, arena_bytes=16 << 20) as node:
        node.put(A, 0, 4)

        async def both() -> tuple[int, bool, int]:
            keys = [BlockKey(bytes([1, i % 256, i // 256]) + bytes(29)) for i in range(1000)]
            spans = (Span(FULL, 0, 1000),)
            reserving = asyncio.create_task(
                node.store.puts.reserve(
                    DAEMON_SESSION, SPEC.id, keys, first_block=0, parent=None, spans=spans
                )
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            hit = node.store.gets.match(SPEC.id, A).hit_blocks
            early = not reserving.done()
            grant = await reserving
            committing = asyncio.create_task(
                node.store.puts.commit(DAEMON_SESSION, grant.lease_id, [0] * 1000)
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            early = early and not committing.done()
            return hit, early, (await committing).committed

        assert node.run(both()) == (4, True, 1000)


def test_one_rotten_record_does_not_take_its_run_with_it(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 4, parts=[FULL])
        node.put(A, 4, 5, parts=[FULL], damage=True)
        node.flush()  # finds it
        assert node.flush()
        stored = node.run(node.store.report.scan(None, None, 9))
        assert {item.block_index for item in stored if item.durable} == {0, 1, 2, 3}
        assert len(stored) == 4


def test_scan_pages_through_every_block_once(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 10)
        seen, after = [], None
        while page := node.run(node.store.report.scan(None, after, 4)):
            seen += [item.key for item in page]
            after = page[-1].key
        assert seen == sorted(A[:10], key=lambda key: (key[-1], key))


def test_a_rotten_part_does_not_take_the_other_parts_of_its_block_with_it(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 4, durable=True)
    for segment in (tmp_path / "kv").glob("*.segment"):
        data = bytearray(segment.read_bytes())
        for at in range(0, len(data), 4096):
            if data[at : at + 8] == b"KVSFRAME" and data[at + 120] == 0:  # group 0
                data[at + 4096 + 100] ^= 1
        segment.write_bytes(data)
    with Node(tmp_path / "kv") as node:
        spans = tuple(Span(part, 0, 4) for part in (FULL, WINDOW))
        grant = node.acquire(A[:4], spans=spans)
        assert [slot is not None for slot in grant.slots] == [False, True, True, True] + [True] * 4
        node.store.release(DAEMON_SESSION, [grant.lease_id])
        assert node.put(A, 0, 4).committed == 1
        assert node.get(A) == 4


def test_what_is_put_again_while_a_large_delete_is_written_stays(tmp_path: Path) -> None:
    """A delete of many keys writes several tombstones; none may kill what came after it."""
    keys = chain(7, 24)
    doomed = [*(chain(name)[0] for name in range(100, 300)), *keys]
    with Node(tmp_path / "kv") as node:
        node.put(keys, 0, 8, durable=True)

        async def delete_and_put() -> None:
            deleting = asyncio.create_task(node.store.deletes.delete(SPEC.id, doomed))
            await asyncio.sleep(0)  # forgotten, and being buried
            spans = tuple(Span(part, 0, 4) for part in (FULL, WINDOW))
            grant = await node.store.puts.reserve(
                DAEMON_SESSION, SPEC.id, keys[:4], first_block=0, parent=None, spans=spans
            )
            sums = []
            for slot, part, key in zip(
                grant.slots, [FULL] * 4 + [WINDOW] * 4, keys[:4] * 2, strict=True
            ):
                assert slot is not None
                node.store.view(slot)[:] = record_bytes(key, part)
                sums.append(checksum(record_bytes(key, part)))
            done = await node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums, durable=True)
            assert done.durable
            await deleting

        node.run(delete_and_put())
        assert node.get(keys) == 4
    with Node(tmp_path / "kv") as node:
        assert node.get(keys) == 4


def test_a_cut_cap_is_kept_once_all_is_indexed(tmp_path: Path) -> None:
    with Node(tmp_path / "kv", segment_nbytes=256 << 10) as node:
        for name in range(12):
            node.put(chain(name), 0, 24, durable=True, wait_s=5.0)
    with Node(tmp_path / "kv", file_bytes=2 << 20, segment_nbytes=256 << 10) as node:
        assert node.file is not None
        node.recall()
        node.run(node.file.settle())
        used = sum(f.stat().st_blocks * 512 for f in (tmp_path / "kv").glob("*.segment"))
        assert 0 < used <= 2 << 20
        assert node.store.report.stats()["file"]["evicted_blocks"] > 0
