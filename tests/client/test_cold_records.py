"""Large records that come up alone: read by several threads, and verified as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, Part, Prefix
from kvstore.client.batch import Batch
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

NBYTES = (3 << 20) + 5000  # neither whole pages nor whole parts
KEYS = sample_keys("large", 3)
RECORDS = sample_records(KEYS, NBYTES)
SPACE = sample_namespace("large", NBYTES)


@pytest.fixture
def client() -> Iterator[Client]:
    """Of a daemon whose file tier alone has the records."""
    with Daemon() as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, RECORDS, durable=True)
        assert client.hints.demote(Prefix(SPACE.id, KEYS)).done_blocks == len(KEYS)
        yield client


def test_one_alone_is_what_was_put(client: Client) -> None:
    assert client.get(SPACE.id, KEYS[1:2]) == RECORDS[1:2]
    assert client.admin.stats()["dram"]["blocks"] == 1
    assert client.get(SPACE.id, KEYS) == RECORDS


@pytest.mark.parametrize("at", [0, 1 << 20, NBYTES - 1])
def test_one_wrong_byte_in_any_part_is_found(client: Client, at: int) -> None:
    grant = client.acquire(SPACE.id, KEYS, file_places=True)
    place = grant.places[1]
    assert place is not None
    client.release(grant.lease_id)
    with Path(place.path).open("r+b") as file:
        file.seek(place.offset + at)
        (byte,) = file.read(1)
        file.seek(place.offset + at)
        file.write(bytes([byte ^ 1]))
    assert client.get(SPACE.id, KEYS[1:2]) == [None]
    assert client.match(SPACE.id, KEYS).hit_blocks == 1
    assert client.get(SPACE.id, KEYS[:1]) == RECORDS[:1]


def test_a_put_begins_with_a_small_window() -> None:
    batch = Batch(SPACE.id, sample_keys("windows", 100), Part(0, 0), 1 << 20)
    sizes = [len(window.keys) for _, window in batch.windows(40 << 20, 8 << 20)]
    assert sizes == [8, 32, 40, 20]
    assert [len(window.keys) for _, window in batch.windows(40 << 20)] == [40, 40, 20]
    whole = [key for where, _ in batch.windows(40 << 20, 8 << 20) for key in batch.keys[where]]
    assert whole == batch.keys
    *_, (_, last) = batch.windows(40 << 20, 8 << 20)
    assert (last.first_block, last.parent) == (80, batch.keys[79])
    assert [len(window.keys) for _, window in batch.windows(1, 1)] == [1] * 100
