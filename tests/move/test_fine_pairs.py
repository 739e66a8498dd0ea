"""Planes of two encodings never meet: what comes from a disk, a bucket or a client beside the base
of another writer is not used, and does not stand in anybody's way for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Part
from kvstore.model.checksum import checksum
from kvstore.model.pair import belongs, named_base
from tests.lossy import base_record, fine_record
from tests.store.lossy_node import BASES, BLOCKS, FINES, SPEC, LossyNode, chain, record

KEYS = chain(1)


def test_a_fine_part_names_its_base_and_nothing_else_does() -> None:
    base = base_record("one", "block", BASES[0], 6000, exact=False)
    fine = fine_record("one", "block", FINES[0], 5000, base)
    assert named_base(fine) == checksum(base)
    assert named_base(base) is None
    assert named_base(b"") is None
    assert named_base(Random(1).randbytes(5000)) is None
    assert belongs(fine, checksum(base))
    assert belongs(fine, None)
    assert not belongs(fine, checksum(fine))


def publish(node: LossyNode, keys: Sequence[BlockKey], writer: str, other: str) -> None:
    """Put bases of one writer beside fine parts of another, as a client that is wrong could."""
    grant, sums = node.reserve(keys, writer=writer)
    items = [(part, at) for part in BASES + FINES for at in range(len(keys))]
    for i, (slot, (part, at)) in enumerate(zip(grant.slots, items, strict=True)):
        if slot is not None and part in FINES:
            data = record(other, keys[at], at, part)
            node.store.view(slot)[:] = data
            sums[i] = checksum(data)
    node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))


def hits(node: LossyNode, keys: Sequence[BlockKey]) -> tuple[int, int]:
    """Return how long a prefix hits, and with its fine parts."""
    match = node.store.gets.match
    return match(SPEC.id, keys).hit_blocks, match(SPEC.id, keys, refined=True).hit_blocks


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_file_that_has_halves_of_two_writers(tmp_path: Path, codec: str) -> None:
    """The first load finds out, and a put with fine parts is taken then."""
    with LossyNode(tmp_path, fine=True, codec=codec) as node:
        publish(node, KEYS, "one", "two")
        assert node.flush()
    with LossyNode(tmp_path, fine=True, codec=codec) as node:
        node.recall()
        assert hits(node, KEYS) == (BLOCKS, BLOCKS)  # nobody has looked
        assert node.read(KEYS, refined=True)[0] == 1
        assert hits(node, KEYS) == (BLOCKS, 1)
        hit, fine = node.read(KEYS)
        assert (hit, fine) == (BLOCKS, 0)
        node.store_blocks(KEYS, writer="two", refined=True)
        hit, fine = node.read(KEYS, refined=True)
        assert hit == BLOCKS
        assert fine


def test_a_client_that_stored_halves_is_reported(tmp_path: Path) -> None:
    """The reader sees it, as the fine part names its base; its report takes the fine part away."""
    with LossyNode(tmp_path, fine=True) as node:
        publish(node, KEYS, "one", "two")
        assert hits(node, KEYS) == (BLOCKS, BLOCKS)
        exact = {0, 7, 14}
        wrong = node.run(node.store.deletes.drop_wrong(SPEC.id, KEYS))
        assert wrong == BLOCKS - len(exact)
        assert hits(node, KEYS) == (BLOCKS, 1)
        assert node.read(KEYS) == (BLOCKS, 0)
        assert node.run(node.store.deletes.drop_wrong(SPEC.id, KEYS)) == 0


def test_halves_in_files_are_found_by_a_report(tmp_path: Path) -> None:
    with LossyNode(tmp_path, fine=True) as node:
        publish(node, KEYS, "one", "two")
        assert node.flush()
    with LossyNode(tmp_path, fine=True) as node:
        node.recall()
        assert node.run(node.store.deletes.drop_wrong(SPEC.id, KEYS)) > 0
        assert hits(node, KEYS) == (BLOCKS, 1)


def upload(path: Path, bucket: Path, writer: str, blocks: int, *, fine: bool) -> None:
    with LossyNode(path, bucket=bucket, fine=True) as node:
        node.store_blocks(KEYS, 0, blocks, writer=writer, fine=fine, durable=True)
        assert node.flush()


def test_two_hosts_uploaded_halves(tmp_path: Path) -> None:
    """A fine part comes with the base of its own object, though another object is longer."""
    bucket = tmp_path / "bucket"
    upload(tmp_path / "1", bucket, "one", BLOCKS, fine=False)
    upload(tmp_path / "2", tmp_path / "other", "two", BLOCKS - 4, fine=True)
    for path in (tmp_path / "other").rglob("*"):
        if path.is_file():
            there = bucket / path.relative_to(tmp_path / "other")
            there.parent.mkdir(parents=True, exist_ok=True)
            if not there.exists():
                there.write_bytes(path.read_bytes())
    with LossyNode(tmp_path / "3", bucket=bucket, fine=True) as node:
        hit, fine = node.read(KEYS)
        assert hit == BLOCKS
        assert fine
        refined, fine = node.read(KEYS, refined=True)
        assert refined == BLOCKS - 4
        assert fine


def test_an_object_with_halves_of_two_writers(tmp_path: Path) -> None:
    """Bases come alone, the fine parts are read once, and who insists computes."""
    bucket = tmp_path / "bucket"
    with LossyNode(tmp_path / "1", bucket=bucket, fine=True) as node:
        publish(node, KEYS, "one", "two")
        assert node.flush()
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        assert node.read(KEYS) == (BLOCKS, 0)
        for _ in range(3):  # there are several objects with some of it
            node.read(KEYS, refined=True)
        found = node.metrics.totals()["corrupt_blocks"]["pair"]
        assert found
        for _ in range(3):
            assert node.read(KEYS, refined=True)[0] == 1
            assert node.read(KEYS) == (BLOCKS, 0)
        assert node.metrics.totals()["corrupt_blocks"]["pair"] == found


def test_exact_blocks_are_not_in_the_way_of_fine_parts(tmp_path: Path) -> None:
    """Who insists gets a prefix from the bucket through the exact blocks in the middle of it."""
    bucket = tmp_path / "bucket"
    upload(tmp_path / "1", bucket, "one", BLOCKS, fine=True)
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        hit, fine = node.read(KEYS, refined=True)
        assert hit == BLOCKS
        assert fine > 2


def test_what_waits_for_room_is_counted_by_bases(tmp_path: Path) -> None:
    """With too much to write, a put is refused whole, and told so without an impossible count."""
    with LossyNode(tmp_path, fine=True, write_behind_bytes_max=1) as node:
        node.store_blocks(chain(2), 0, 2)
        done = node.store_blocks(chain(3))
        if done.refused:
            assert (done.committed, done.existing, done.refused) == (0, 0, 2 * BLOCKS)
        else:
            pytest.fail("nothing waited to be written")


def test_a_base_that_was_durable_is_found_though_a_refined_put_was_not_written(
    tmp_path: Path,
) -> None:
    with LossyNode(tmp_path, fine=True) as node:
        node.store_blocks(KEYS, 1, 5, fine=False, durable=True)
        framed = list(node.planner._ledger.frames)
        grant, sums = node.reserve(KEYS, 1, 5, writer="two", refined=True)
        done = node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))
        assert done.committed > 0
        assert all(frame in node.planner._ledger.frames for frame in framed)
        assert node.flush()
        assert not len(node.planner._ledger.replaced)
        assert not all(frame in node.planner._ledger.frames for frame in framed)


def test_a_part_is_named_by_its_group() -> None:
    assert [SPEC.groups[part.group].refines for part in FINES] == [0, 1]
    assert Part(0, 0) in BASES
