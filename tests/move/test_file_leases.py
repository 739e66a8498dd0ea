"""Places in files lent to readers: what they read counts, and nothing of it is given away."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvstore.decide.planner import DAEMON_SESSION, Read
from kvstore.model.block import BlockKey, FilePlace, Grant, Slot, Span
from kvstore.model.checksum import checksum
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file.devices import admission
from tests.sim.loop import SimLoop
from tests.store.node import FULL, SPEC, WINDOW, Node, chain, record_bytes

A, B = chain(1), chain(2)


def stored(path: Path, *chains: Sequence[BlockKey], codec: str = "raw") -> Path:
    """Store chains durably; the next node there has none of them in its arena."""
    with Node(path, codec=codec) as node:
        for keys in chains:
            assert node.put(keys, durable=True).durable
    return path


def read(place: FilePlace) -> bytes:
    """Read as an engine would: zeros where there is nothing."""
    path = Path(place.path)
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.nbytes)


def check(node: Node, keys: Sequence[BlockKey], grant: Grant) -> None:
    """See that every record of a grant is there, in a slot or a file."""
    items = [(span.part, keys[i]) for span in grant.spans for i in range(span.begin, span.end)]
    places = grant.places or (None,) * len(grant.slots)
    assert len(items) == len(grant.slots) == len(places)
    for (part, key), slot, place, value in zip(
        items, grant.slots, places, grant.checksums, strict=True
    ):
        assert (slot is None) != (place is None)
        data = bytes(node.store.view(slot)) if slot is not None else read(place)  # type: ignore[arg-type]
        assert data == record_bytes(key, part)
        assert checksum(data) == value


def release(node: Node, grant: Grant) -> bool:
    async def on_the_loop() -> bool:
        return node.store.release(DAEMON_SESSION, [grant.lease_id])[0]

    return node.run(on_the_loop())


def leased_bytes(node: Node) -> int:
    return int(node.store.report.stats()["file"]["leased_bytes"])


def physical(node: Node) -> int:
    assert node.file is not None
    node.run(node.file.settle())
    return node.file.frames.physical_nbytes


def test_what_only_files_have_is_read_there_byte_for_byte(tmp_path: Path) -> None:
    with Node(stored(tmp_path / "kv", A)) as node:
        grant = node.acquire(A, in_files=True)
        assert grant.hit_blocks == len(A)
        assert not any(grant.slots)
        assert all(grant.places)
        assert all(place.offset % 4096 == 0 for place in grant.places if place)
        check(node, A, grant)
        stats = node.store.report.stats()
        assert stats["dram"]["blocks"] == 0, "nothing came up"
        assert stats["leases"] == 1
        assert 0 < leased_bytes(node) <= stats["file"]["leased_bytes_max"]
        assert node.metrics.hits.labels("file")._value.get() == len(A)
        assert node.metrics.bytes.labels("file", "read")._value.get() == 0
        assert node.metrics.bytes.labels("file", "lent")._value.get() >= len(A) * 10_000
        assert release(node, grant)
        assert leased_bytes(node) == 0


def test_who_does_not_read_files_is_served_as_ever(tmp_path: Path) -> None:
    with Node(stored(tmp_path / "kv", A)) as node:
        grant = node.acquire(A)
        assert grant.places == ()
        check(node, A, grant)
        assert all(grant.slots)
        release(node, grant)


def test_what_is_in_the_arena_or_not_durable_yet_comes_from_there(tmp_path: Path) -> None:
    with Node(stored(tmp_path / "kv", A[:10])) as node:
        assert node.get(A[:4]) == 4
        node.put(A, 10, 14)
        grant = node.acquire(A[:14], in_files=True)
        assert grant.hit_blocks == 14
        check(node, A[:14], grant)
        full = grant.slots[:14]
        assert [slot is None for slot in full] == [False] * 4 + [True] * 6 + [False] * 4
        assert release(node, grant)


def test_parts_are_lent_one_by_one(tmp_path: Path) -> None:
    with Node(stored(tmp_path / "kv", A[:8])) as node:
        keys = [*A[:4], *B[:2]]
        spans = (Span(FULL, 0, 6), Span(WINDOW, 1, 3))
        grant = node.acquire(keys, spans=spans, in_files=True)
        assert [place is not None for place in grant.places] == [True] * 4 + [False] * 2 + [
            True
        ] * 2
        assert [read(p) for p in grant.places if p] == [
            *(record_bytes(key, FULL) for key in A[:4]),
            *(record_bytes(key, WINDOW) for key in A[1:3]),
        ]
        assert release(node, grant)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_what_was_encoded_comes_up(tmp_path: Path, codec: str) -> None:
    with Node(stored(tmp_path / "kv", A, codec=codec)) as node:
        grant = node.acquire(A, in_files=True)
        assert grant.hit_blocks == len(A)
        check(node, A, grant)
        # The window's records have a page each, which encoding does not make any less.
        assert all(part_slots(grant, FULL))
        assert not any(part_slots(grant, WINDOW))
        assert release(node, grant)


def test_what_is_to_be_read_in_files_stays_while_the_rest_comes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a prefix was encoded, its end, which is the first to leave, was not."""
    with Node(stored(tmp_path / "kv", A[:8], codec="zstd")) as node:
        assert node.put(A, 8, 24, durable=True).durable
    with Node(tmp_path / "kv") as node:
        start = node.write_behind.reads.start

        def start_and_evict(read: Read) -> None:
            start(read)
            node.planner.eviction.evict_file(1 << 40)

        monkeypatch.setattr(node.write_behind.reads, "start", start_and_evict)
        grant = node.acquire(A, in_files=True)
        assert grant.hit_blocks == len(A)
        assert any(grant.slots)
        check(node, A, grant)
        assert release(node, grant)


def test_what_the_node_lacks_comes_from_the_bucket_beside_what_is_read_in_files(
    tmp_path: Path,
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    with Node(tmp_path / "1", bucket=bucket) as one:
        one.put(A, 0, 20, durable=True)
    with Node(stored(tmp_path / "2", A[:10]), bucket=bucket) as two:
        grant = two.acquire(A[:20], in_files=True)
        assert grant.hit_blocks == 20
        check(two, A[:20], grant)
        assert part_slots(grant, FULL) == [False] * 10 + [True] * 10
        hits = two.metrics.totals()["hit_blocks"]
        assert (hits["file"], hits["object"]) == (10, 10)
        assert release(two, grant)


def part_slots(grant: Grant, part: object) -> list[bool]:
    slots: list[Slot | None] = list(grant.slots)
    found = []
    for span in grant.spans:
        share = [slots.pop(0) for _ in range(span.end - span.begin)]
        if span.part == part:
            found += [slot is not None for slot in share]
    return found


def test_a_delete_is_answered_at_once_and_the_bytes_stay_for_who_reads_them(
    tmp_path: Path,
) -> None:
    path = stored(tmp_path / "kv", A)
    with Node(path) as node:
        grant = node.acquire(A, in_files=True)
        assert node.run(node.store.deletes.delete(SPEC.id, A)) == len(A)
        assert node.acquire(A, in_files=True).hit_blocks == 0
        before = physical(node)
        check(node, A, grant)
        assert release(node, grant)
        assert physical(node) < before - len(A) * 10_000, "the space is back"
        assert not any(any(read(place)) for place in grant.places if place)
    with Node(path) as node:
        assert node.acquire(A).hit_blocks == 0


def test_a_deleted_block_does_not_come_back_when_the_daemon_dies_under_a_lease(
    tmp_path: Path,
) -> None:
    path = stored(tmp_path / "kv", A)
    with Node(path) as node:
        node.acquire(A, in_files=True)
        node.run(node.store.deletes.delete(SPEC.id, A))
    with Node(path) as node:
        assert node.acquire(A).hit_blocks == 0


def test_leased_frames_stay_when_the_file_tier_is_full(tmp_path: Path) -> None:
    """Half of the cap is held; what is put passes through the other half."""
    with Node(tmp_path / "kv", file_bytes=2 << 20, segment_nbytes=1 << 18) as node:
        node.put(A, durable=True)
        node.run(node.store.deletes.clear(None))
        node.put(A, durable=True)
    with Node(tmp_path / "kv", file_bytes=2 << 20, segment_nbytes=1 << 18) as node:
        grant = node.acquire(A, in_files=True)
        assert grant.hit_blocks == len(A)
        for name in range(10, 30):
            node.put(chain(name), durable=True)
            assert physical(node) <= 2 << 20
        assert node.store.report.stats()["file"]["evicted_blocks"] > 100
        check(node, A, grant)
        assert release(node, grant)
        for name in range(30, 40):
            node.put(chain(name), durable=True)
        assert node.acquire(A, in_files=True).hit_blocks == 0, "now they were the first to leave"


def test_places_are_lent_up_to_a_bound_and_what_is_beyond_comes_up(tmp_path: Path) -> None:
    bound = {"file_bytes": 4 << 20, "leased_fraction": 0.12}
    with Node(stored(tmp_path / "kv", A, B), **bound) as node:  # type: ignore[arg-type]
        first = node.acquire(A, in_files=True)
        assert all(first.places)
        other = node.acquire(B, in_files=True)
        assert other.places == ()
        check(node, B[: other.hit_blocks], other)
        assert leased_bytes(node) <= node.store.report.stats()["file"]["leased_bytes_max"]
        assert release(node, first)
        assert release(node, other)
        assert all(node.acquire(chain(1), in_files=True).places)


def test_past_its_deadline_a_lease_holds_no_space_and_its_reader_gets_nothing(
    tmp_path: Path,
) -> None:
    """As when an engine is stopped in the middle of a read, and goes on when all is gone."""
    with Node(stored(tmp_path / "kv", A), loop=SimLoop(Random(0)), lease_s=0.5) as node:
        grant = node.acquire(A, in_files=True)
        node.run(node.store.deletes.delete(SPEC.id, A))
        held = physical(node)
        node.run(asyncio.sleep(2.0))
        assert leased_bytes(node) == 0
        assert physical(node) < held - len(A) * 10_000
        node.put(B, durable=True)  # whatever is written next is not where they were
        late = [read(place) for place in grant.places if place]
        sums = [value for value, place in zip(grant.checksums, grant.places, strict=True) if place]
        assert all(checksum(data) != value for data, value in zip(late, sums, strict=True))
        assert not release(node, grant)


def test_a_lease_of_a_disk_that_went_out_of_use_was_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 60.0)
    paths = [tmp_path / "a", tmp_path / "b"]
    with Node(paths) as node:
        for keys in (A, B):
            node.put(keys, durable=True)
    disks = (FaultyDisk(), FaultyDisk())
    with Node(paths, disks=disks) as node:
        assert node.file is not None
        grant = node.acquire(A, in_files=True)
        (home,) = {Path(place.path).parent for place in grant.places[:1] if place}
        index = paths.index(home)
        disks[index].fault = failing("preadv", errno.EIO)
        probe = [k for k in (*A, *B) if on(node, k, index)][:1]
        node.run(node.store._promotion.promote(SPEC.id, probe, [Span(FULL, 0, 1)], 1e12))
        assert node.file.devices[index].mount is None
        assert not release(node, grant)
        disks[index].fault = None


def on(node: Node, key: BlockKey, index: int) -> bool:
    block = node.planner.index.by_key(key)
    record = block.record(FULL) if block is not None else None
    assert node.file is not None
    return (
        record is not None
        and record.frame is not None
        and record.frame.extent.mount.device is node.file.devices[index]
    )
