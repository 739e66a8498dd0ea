"""What readers report as corrupt, to a real daemon: it believes nobody and finds what is rotten."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.testing.daemon import Daemon, restarted_with
from kvstore.testing.damage import damage_resident
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.tier.file.frames import flip

SPACE = sample_namespace("reports", 2 * PAGE_NBYTES)
KEYS = sample_keys("reports", 8)
RECORDS = sample_records(KEYS, 2 * PAGE_NBYTES)


def reported(client: Client) -> dict[str, float]:
    return dict(client.admin.stats()["totals"].get("reported_blocks", {}))


def flip_block(directory: Path, block: int) -> None:
    """Flip a bit of a block of the first frame of the first segment."""
    (segment, *_) = sorted(directory.glob("*.segment"))
    flip(segment, 2 * PAGE_NBYTES + block * padded(2 * PAGE_NBYTES) + 99)


def test_a_lie_deletes_nothing_however_often_it_is_told(daemon: Daemon) -> None:
    with Client(daemon.target) as owner, Client(daemon.target) as liar:
        owner.register(SPACE)
        assert owner.put(SPACE.id, KEYS, RECORDS, durable=True).durable
        for _ in range(20):
            assert liar.admin.delete(SPACE.id, KEYS, corrupt=True) == 0
        assert owner.get(SPACE.id, KEYS) == RECORDS
        assert reported(owner)["kept"] >= 20 * len(KEYS)


def test_a_reader_that_finds_the_arena_wrong_gets_it_dropped() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        assert client.put(SPACE.id, KEYS, RECORDS, durable=True).durable
        damage_resident(client, SPACE.id, KEYS[3:4])
        assert client.get(SPACE.id, KEYS) == [*RECORDS[:3], None, *RECORDS[4:]]
        assert reported(client) == {"dropped": 1}
        assert client.get(SPACE.id, KEYS, wait_s=5) == RECORDS, "the frame answers"


def test_a_rotten_frame_is_dropped_when_a_reader_of_files_reports_it() -> None:
    with restarted_with(SPACE, KEYS, RECORDS) as daemon, Client(daemon.target) as client:
        client.register(SPACE)
        flip_block(daemon.directory / "file", 5)
        rows = np.frombuffer(mmap.mmap(-1, len(KEYS) * 2 * PAGE_NBYTES), np.uint8)
        targets = list(rows.reshape(len(KEYS), -1))
        grant = client.acquire(SPACE.id, KEYS, wait_s=5, file_places=True)
        assert grant.places[5] is not None, "it would be read in its file"
        client.release(grant.lease_id)
        assert client.admin.delete(SPACE.id, KEYS[5:6], corrupt=True) == 1
        assert client.admin.stats()["dram"]["blocks"] == 0
        found = client.get_into(SPACE.id, KEYS, targets, wait_s=5, from_files=True)
        assert found == [True] * 5 + [False] + [True] * 2
        assert reported(client) == {"dropped": 1}


def test_get_into_from_files_finds_the_rot_and_the_daemon_drops_it() -> None:
    with restarted_with(SPACE, KEYS, RECORDS) as daemon, Client(daemon.target) as client:
        client.register(SPACE)
        flip_block(daemon.directory / "file", 5)
        rows = np.frombuffer(mmap.mmap(-1, len(KEYS) * 2 * PAGE_NBYTES), np.uint8)
        targets = list(rows.reshape(len(KEYS), -1))
        found = client.get_into(SPACE.id, KEYS, targets, wait_s=5, from_files=True)
        assert found == [True] * 5 + [False] + [True] * 2
        assert client.match(SPACE.id, KEYS).hit_blocks == 5


def test_a_reader_whose_own_copy_was_wrong_costs_nobody_the_block(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena was right, what reached the reader was not: a miss for it, a hit for all others."""
    with Client(daemon.target) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, RECORDS)
        before = reported(client).get("kept", 0)
        with monkeypatch.context() as patch:
            patch.setattr("kvstore.client.copying.checksum", lambda record: 1)
            assert client.get(SPACE.id, KEYS) == [None] * len(KEYS)
        assert reported(client)["kept"] == before + len(KEYS)
        assert client.get(SPACE.id, KEYS) == RECORDS
