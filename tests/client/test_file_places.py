"""Places in files, leased by clients of a real daemon: read beside it, given back in any case."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import AsyncClient, Client, FilePlace, Grant, InvalidRequest, Part, Span, checksum
from kvstore.testing.daemon import Daemon, restarted_with
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

KEYS = sample_keys("places", 20)
RECORDS = sample_records(KEYS)
SPACE = sample_namespace()
HOLDER = """
import sys
from kvstore import Client
from kvstore.testing.samples import sample_keys, sample_namespace
client = Client(sys.argv[1])
space = client.register(sample_namespace())
grant = client.acquire(space, sample_keys("places", 20), file_places=True)
print(sum(place is not None for place in grant.places), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with restarted_with(SPACE, KEYS, RECORDS) as daemon:
        yield daemon


def read(place: FilePlace | None) -> bytes:
    assert place is not None
    with Path(place.path).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.nbytes)


def check(grant: Grant) -> None:
    assert grant.hit_blocks == len(KEYS)
    assert not any(grant.slots)
    assert [read(place) for place in grant.places] == RECORDS
    assert list(grant.checksums) == [checksum(record) for record in RECORDS]


def leased_bytes(client: Client) -> int:
    return int(client.admin.stats()["file"]["leased_bytes"])


def test_records_are_read_beside_the_daemon(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        grant = client.acquire(SPACE.id, KEYS, file_places=True)
        check(grant)
        assert leased_bytes(client) > 0
        assert client.release(grant.lease_id) == [True]
        assert leased_bytes(client) == 0
        assert client.admin.stats()["dram"]["blocks"] == 0

    async def again() -> None:
        client = AsyncClient(daemon.target)
        await client.register(SPACE)
        grant = await client.acquire(SPACE.id, KEYS, file_places=True)
        check(grant)
        assert await client.release(grant.lease_id) == [True]
        parts = await client.acquire(
            SPACE.id, KEYS, spans=[Span(Part(0, 0), 3, 5)], file_places=True
        )
        assert [read(place) for place in parts.places] == RECORDS[3:5]
        await client.close()

    asyncio.run(again())


def test_a_lease_of_places_ends_with_the_daemon_and_the_bytes_do_not(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        grant = client.acquire(SPACE.id, KEYS, file_places=True)
        daemon.kill()
        check(grant)
        daemon.start()
        until(lambda: client.available and leased_bytes(client) == 0, 20)
        assert client.release(grant.lease_id) == [False]
        again = client.acquire(SPACE.id, KEYS, file_places=True)
        check(again)


def test_an_engine_that_is_killed_holds_nothing(daemon: Daemon) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, daemon.target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline() == b"20\n"
        with Client(daemon.target) as client:
            assert leased_bytes(client) > 0
            holder.kill()
            until(lambda: leased_bytes(client) == 0, 20)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def test_who_does_not_map_the_arena_is_lent_nothing(daemon: Daemon) -> None:
    with Client(daemon.target, arena=False) as client:
        client.register(SPACE)
        with pytest.raises(InvalidRequest, match="arena"):
            client.acquire(SPACE.id, KEYS, file_places=True)
