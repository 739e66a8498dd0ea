"""Deletes that etcd keeps, as a store applies them that cannot tell how far it is, was away for too
long, or has a disk that does not take them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvstore.membership.etcd_deletes import Delete
from kvstore.membership.state_files import DELETES_FILE, DELETES_NBYTES_MAX, AppliedDeletes
from kvstore.model.errors import Unavailable
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import DeviceState
from kvstore.tier.file.devices import admission, tombstones
from tests.store.node import SPEC, Node
from tests.store.test_fleet_deletes import A, B, Engine, Etcd, kept_of


@pytest.mark.parametrize("begun", [True, False], ids=["", "since-its-start"])
def test_who_does_not_reach_etcd_for_longer_than_it_keeps_deletes_drops_its_files_once(
    tmp_path: Path, *, begun: bool
) -> None:
    etcd, clock = Etcd(), [0.0]
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        kept = kept_of(node, etcd, Engine(), None, lambda: clock[0])
        if begun:
            assert node.run(kept._try())
            clock[0] += etcd.token_s  # no longer than that
            assert node.run(kept._try())
            assert node.get(A) == 16
        clock[0] += etcd.token_s + 1.0
        etcd.refusal = Unavailable("no endpoint answers")
        assert not node.run(kept._try())
        assert node.get(A) == 16  # it goes on with what it has
        etcd.refusal = None
        assert node.run(kept._try())
        assert node.get(A) == 0
        node.put(B, durable=True, wait_s=5.0)
        assert node.run(kept._try())
        assert node.metrics.totals()["fleet_deletes"]["dropped_all"] == 1
    with Node(tmp_path / "a") as node:
        node.recall()
        assert (node.get(A), node.get(B)) == (0, 16)


@pytest.mark.parametrize(
    ("note", "hit"),
    [
        ("as it was", 16),
        ("none yet", 16),
        (b"", 0),
        (b'{"fleet":"default"', 0),
        (b" " * (DELETES_NBYTES_MAX + 1), 0),
        ("unreadable", 0),
    ],
    ids=["", "first-start", "empty", "torn", "too-large", "unreadable"],
)
def test_who_cannot_read_how_far_it_is_drops_its_files(
    tmp_path: Path, note: str | bytes, hit: int
) -> None:
    etcd, applied, path = Etcd(), AppliedDeletes(tmp_path, "default"), tmp_path / DELETES_FILE
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        node.run(kept_of(node, etcd, Engine(), applied).start())
    if isinstance(note, bytes):
        path.write_bytes(note)
    elif note != "as it was":
        path.unlink()
    if note == "unreadable":
        path.mkdir()
    with Node(tmp_path / "a") as node:
        node.recall()
        kept = kept_of(node, etcd, Engine(), applied)
        node.run(kept.start())
        assert kept.current
        assert node.get(A) == hit


def test_a_delete_of_an_etcd_that_was_emptied_and_has_come_further_is_applied(
    tmp_path: Path,
) -> None:
    etcd, engine = Etcd(), Engine()
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        kept = kept_of(node, etcd, engine, None)
        node.run(kept.start())
        etcd.renewed, engine.claims = "", 2  # it has no key of this daemon, and no token
        etcd.deletes = [Delete(SPEC.id, tuple(A[8:]), 3)]
        etcd.revision += 100
        assert node.run(kept._try())
        assert node.get(A) == 8


@pytest.mark.parametrize("missed_max", [16, 1], ids=["", "more-than-are-kept-for-a-disk"])
def test_a_delete_is_not_done_as_long_as_a_disk_has_not_taken_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missed_max: int
) -> None:
    monkeypatch.setattr(tombstones, "MISSED_MAX", missed_max)
    monkeypatch.setattr(admission, "RETRY_S", 0.02)
    monkeypatch.setattr(admission, "RETRY_MAX_S", 0.02)
    disks, paths = [FaultyDisk(syncs=False) for _ in range(2)], [tmp_path / "a", tmp_path / "b"]
    with Node(paths, disks=disks, hang_s=5.0) as node:
        for keys in (A, B):
            node.put(keys, durable=True, wait_s=5.0)
        assert node.file is not None
        device = node.file.devices[0]
        disks[0].fault = failing("pwritev", errno.EIO)
        burials = [node.store.deletes.burial(SPEC.id, keys[8:]) for keys in (A, B)]
        for _ in range(2):
            for burial in burials:
                with pytest.raises(Unavailable):
                    node.run(burial.run())
        assert device.mount is not None, "it is read meanwhile"
        disks[0].fault = None
        node.until(lambda: device.state is DeviceState.OK)
        assert [node.run(burial.run()) for burial in burials] == [8, 8]
    with Node(paths) as node:
        node.recall()
        assert not any(node.planner.index.get(SPEC.id, key) for key in (*A[8:], *B[8:]))
