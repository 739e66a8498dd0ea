"""A reader's report alone deletes nothing: the daemon verifies its own copies, within bounds."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from kvstore.decide.index import StoredPart
from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.errors import Unavailable
from kvstore.model.outcome import Reason
from kvstore.move import verify
from kvstore.testing.disks import FaultyDisk, failing
from tests.store.node import FULL, RECORD, SPEC, WINDOW, Node, chain
from tests.tier.file.frames import flip

A = chain(1, 4)


def report(node: Node, begin: int = 0, end: int | None = None) -> int:
    return node.run(node.store.deletes.drop_wrong(SPEC.id, A[begin:end]))


def reported(node: Node) -> dict[str, float]:
    return node.metrics.totals().get("reported_blocks", {})


def record_of(node: Node, at: int) -> StoredPart:
    block = node.planner.index.by_key(A[at])
    record = block.record(FULL) if block is not None else None
    assert record is not None
    return record


def damage_arena(node: Node, at: int) -> None:
    held = record_of(node, at).resident
    assert held is not None
    view = node.arena.view(held.slot)
    view[17] ^= 1
    view.release()


def damage_file(node: Node, at: int) -> None:
    """Flip a bit of the record's stored bytes in its segment."""
    record = record_of(node, at)
    assert record.frame is not None
    raw = node.write_behind.reads.raw_file(record.frame)
    assert raw is not None
    flip(Path(raw.path), raw.offsets[record.position] + 17)


def test_a_false_report_deletes_nothing(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)
        assert report(node) == 0
        assert node.get(A) == len(A)
        assert reported(node) == {"kept": len(A)}
        assert not any(node.metrics.totals().get("corrupt_blocks", {}).values())


def test_what_is_not_stored_is_counted_and_nothing_else(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        assert report(node) == 0
        assert reported(node) == {"unknown": len(A)}


def test_a_wrong_copy_in_the_arena_leaves_and_the_frame_answers(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)
        damage_arena(node, 2)
        assert report(node) == 1
        assert record_of(node, 2).resident is None
        assert node.get(A) == len(A), "it has come up again"
        assert reported(node) == {"kept": 3, "dropped": 1}
        assert node.metrics.totals()["corrupt_blocks"]["reader"] == 1


def test_without_a_frame_a_wrong_record_is_forgotten() -> None:
    with Node(None) as node:
        node.put(A)
        damage_arena(node, 2)
        assert report(node) == 1
        assert node.get(A) == 2
        ending = node.store.report.explain(SPEC.id, A).ending
        assert ending is not None
        assert ending.reason is Reason.CORRUPT
        assert node.put(A).committed == 1, "it can be put anew"
        assert node.get(A) == len(A)


def test_a_wrong_record_leaves_while_it_waits_to_be_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path / "kv", disk=disk) as node:
        disk.fault = failing("pwritev", errno.EIO)
        node.put(A)
        damage_arena(node, 1)
        assert report(node) == 1
        disk.fault = lambda _: None
        assert node.get(A) == 1


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_rotten_frame_is_found_and_written_anew_from_the_arena(
    tmp_path: Path, codec: str
) -> None:
    with Node(tmp_path / "kv", codec=codec) as node:
        node.put(A, durable=True)
        damage_file(node, 1)
        assert report(node) == 1
        assert node.flush()
        assert report(node) == 0
    with Node(tmp_path / "kv", codec=codec) as node:
        assert node.get(A) == len(A)


def test_a_rotten_frame_that_the_arena_lacks_is_forgotten(tmp_path: Path) -> None:
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)
    with Node(tmp_path / "kv") as node:
        node.recall()
        damage_file(node, 1)
        assert report(node) == 1
        assert node.get(A) == 1
        assert node.store.report.stats()["dram"]["blocks"] == 1, "the report brought nothing up"
        block = node.planner.index.by_key(A[1])
        assert block is not None
        assert block.record(WINDOW) is not None, "the part that is good stays"


def test_a_disk_that_fails_condemns_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path / "kv", disk=disk) as node:
        node.put(A, durable=True)
        disk.fault = failing("preadv", errno.EIO)
        with pytest.raises(Unavailable, match="cannot be read"):
            report(node)
        disk.fault = lambda _: None
        assert reported(node) == {"unverified": len(A)}
        assert node.get(A) == len(A)
        assert not any(frame.pins for frame in node.planner._ledger.frames)


def test_a_leased_slot_that_is_wrong_stays_the_readers_until_it_is_released() -> None:
    with Node(None) as node:
        node.put(A)
        grant = node.acquire(A)
        damage_arena(node, 0)
        before = node.arena.physical_nbytes
        assert report(node) == 1
        assert node.arena.physical_nbytes == before
        assert node.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
        assert node.arena.physical_nbytes < before


def test_reports_of_all_clients_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the same is reported, it costs reads at a rate."""
    monkeypatch.setattr(verify, "NBYTES_PER_S", 100 * RECORD)
    monkeypatch.setattr(verify, "BURST_NBYTES", 20 * RECORD)
    monkeypatch.setattr(verify, "REPORT_S", 0.5)
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)

        async def flood() -> list[int | BaseException]:
            reports = [node.store.deletes.drop_wrong(SPEC.id, A) for _ in range(64)]
            return await asyncio.gather(*reports, return_exceptions=True)

        answers = node.run(flood())
        refused = [answer for answer in answers if isinstance(answer, Unavailable)]
        assert len(refused) + answers.count(0) == 64
        assert {error.reason for error in refused} == {"reports"}
        assert len(refused) >= 64 - verify.REPORTS_MAX
        read_nbytes = node.metrics.bytes.labels("file", "scrub")._value.get()
        assert read_nbytes < 20 * RECORD + 0.6 * 100 * RECORD + 4 * RECORD
        assert node.get(A) == len(A)
