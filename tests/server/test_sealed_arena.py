"""A sealed arena: clients read it in place, and nobody but the daemon can write to it."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncClient, Client
from kvstore.model.block import Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.tier.dram.extent_memory import make_extent

NAMESPACE = sample_namespace()
KEYS = sample_keys("sealed", 40)
RECORDS = sample_records(KEYS)
SPANS = (Span(Part(0, 0), 0, len(KEYS)),)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    sealed = ("dram.guaranteed=32MiB", "file.guaranteed=64MiB", "arena=sealed")
    with Daemon(*(f"tenants.acme.{each}" for each in sealed)) as daemon:
        yield daemon.start()
        daemon.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}") as client:
        client.register(NAMESPACE)
        yield client


def reserve_and_fill(client: Client, records: list[bytes]) -> int:
    """Reserve slots for all keys, and write these records there; return the lease."""
    grant = client.reserve(NAMESPACE.id, KEYS, first_block=0, parent=None, spans=SPANS)
    for slot, record in zip(grant.slots, records, strict=True):
        assert slot is not None
        client.view(slot)[:] = record
    return grant.lease_id


def test_what_is_put_is_read_in_place(client: Client) -> None:
    done = client.put(NAMESPACE.id, KEYS, RECORDS, durable=True)
    assert (done.committed, done.durable) == (len(KEYS), True)
    assert client.get(NAMESPACE.id, KEYS) == RECORDS
    lease = client.acquire(NAMESPACE.id, KEYS)
    assert lease.slots[0] is not None
    view = client.view(lease.slots[0])
    assert view.readonly
    assert bytes(view) == RECORDS[0]


def test_a_descriptor_of_an_extent_makes_no_mapping_that_can_be_written_to() -> None:
    fd, mapped = make_extent(1 << 20, set(), sealed=True)
    view = mapped.view()
    view[:5] = b"right"  # the daemon can
    assert attempts_to_write(fd) == [True] * 4
    assert view[:5] == b"right"
    fd, mapped = make_extent(1 << 20, set())
    assert attempts_to_write(fd)[:3] == [False] * 3, "this test would not see a writable one"


def attempts_to_write(fd: int) -> list[bool]:
    """Try each way to write to an extent; return whether it was refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = os.fstat(fd).st_size

    def refused(attempt: object) -> bool:
        try:
            return bool(attempt())  # type: ignore[operator]
        except OSError:
            return True

    def protect() -> bool:
        mapped = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        return libc.mprotect(ctypes.c_void_p(address), 4096, 3) != 0

    results = [
        refused(lambda: not mmap.mmap(fd, nbytes)),
        refused(protect),
        refused(lambda: not os.pwrite(fd, b"x", 0)),
        libc.fallocate(fd, 3, ctypes.c_int64(0), ctypes.c_int64(4096)) != 0,
    ]
    os.close(fd)
    return results


def test_a_record_that_is_not_what_its_checksum_says_is_never_published(client: Client) -> None:
    lease = reserve_and_fill(client, RECORDS)
    sums = [checksum(record) for record in RECORDS]
    sums[7] ^= 1
    with pytest.raises(CorruptBlock, match="record 7"):
        client.commit(lease, sums)
    assert client.match(NAMESPACE.id, KEYS).hit_blocks == 0
    assert client.put(NAMESPACE.id, KEYS, RECORDS).committed == len(KEYS)


def test_what_is_written_after_the_commit_reaches_nobody(client: Client) -> None:
    grant = client.reserve(NAMESPACE.id, KEYS, first_block=0, parent=None, spans=SPANS)
    for slot, record in zip(grant.slots, RECORDS, strict=True):
        assert slot is not None
        client.view(slot)[:] = record
    assert client.commit(grant.lease_id, [checksum(each) for each in RECORDS]).committed
    for slot in grant.slots:
        assert slot is not None
        client.view(slot)[:] = bytes(slot.nbytes)
    assert client.get(NAMESPACE.id, KEYS) == RECORDS


def test_staging_memory_comes_back_from_every_end_of_a_reservation(client: Client) -> None:
    keys = sample_keys("many", 400)  # 10 MiB of the 16 that there are
    spans = (Span(Part(0, 0), 0, 400),)
    for _ in range(6):
        grant = client.reserve(
            NAMESPACE.id, keys, first_block=0, parent=None, spans=spans, wait_s=5
        )
        assert grant.refused == 0
        client.release(grant.lease_id)


def staging_present() -> int:
    """Return how many bytes there are of the staging memory that this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0] for line in maps if "memfd:kvstore-staging" in line]
    return sum(Path(f"/proc/self/map_files/{span}").stat().st_blocks * 512 for span in spans)


@pytest.mark.skipif(os.getuid() != 0, reason="map_files is root's")
def test_what_is_committed_unwritten_takes_no_memory_beside_the_arena(daemon: Daemon) -> None:
    with Client(f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}") as client:
        client.register(NAMESPACE)
        grant = client.reserve(NAMESPACE.id, KEYS, first_block=0, parent=None, spans=SPANS)
        zeros = [bytes(slot.nbytes) for slot in grant.slots if slot is not None]
        view = client.view(grant.slots[0] or pytest.fail("no slot"))
        client.commit(grant.lease_id, [checksum(each) for each in zeros])
        assert staging_present() == 0
        assert client.get(NAMESPACE.id, KEYS) == zeros
        view[:] = b"x" * len(view)
        assert staging_present() > 0, "this test would not see memory that is taken"
    until(lambda: staging_present() == 0)  # the view keeps the mapping
    assert bytes(view) == bytes(len(view))


def test_more_than_the_staging_memory_is_put_in_pieces(daemon: Daemon) -> None:
    namespace = sample_namespace("large", 4 << 20)
    keys = sample_keys("large", 6)
    records = [bytes([each]) * (4 << 20) for each in range(6)]
    with Client(f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}") as client:
        client.register(namespace)
        assert client.put(namespace.id, keys, records, wait_s=10).committed == 6
        assert client.get(namespace.id, keys, wait_s=5) == records


def test_a_put_that_does_not_wait_finds_room_for_each_of_its_pieces() -> None:
    """Each is reserved when memory of the one before the last is free again."""
    namespace = sample_namespace("pieces", 1 << 20)
    keys = sample_keys("pieces", 190)  # twice what there is beside the arena
    draw = np.random.default_rng(1)
    records = [draw.bytes(1 << 20) for _ in keys]
    sealed = ("dram.guaranteed=256MiB", "arena=sealed")
    settings = (f"tenants.acme.{each}" for each in sealed)
    with Daemon("dram.capacity=256MiB", *settings, file=False) as daemon:
        daemon.start()
        with Client(f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}") as client:
            client.register(namespace)
            until(lambda: client.admin.stats()["dram"]["reserved_bytes"] >= 256 << 20)
            done = client.put(namespace.id, keys, records, wait_s=0)
            assert (done.committed, done.refused) == (len(keys), 0)
            assert client.get(namespace.id, keys) == records


def test_two_clients_have_memory_of_their_own(daemon: Daemon, client: Client) -> None:
    with Client(f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}") as other:
        other.register(NAMESPACE)
        other.connect()
        ours = {id for id, view in client.extents().items() if not view.readonly}
        theirs = {id for id, view in other.extents().items() if not view.readonly}
        assert len(ours) == len(theirs) == 1
        assert ours.isdisjoint(theirs)


def test_streams_over_grpc_write_to_a_sealed_arena_too(daemon: Daemon, client: Client) -> None:
    with Client(f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}", arena=False) as remote:
        remote.register(NAMESPACE)
        assert remote.put(NAMESPACE.id, KEYS, RECORDS).committed == len(KEYS)
    assert client.get(NAMESPACE.id, KEYS) == RECORDS


def test_a_put_that_ends_early_leaves_no_reservation() -> None:
    """Slots for the next piece are reserved while one is written, and one is being copied."""
    namespace = sample_namespace("large", 1 << 20)
    keys = sample_keys("large", 128)
    records = [bytes(1 << 20)] * len(keys)
    sealed = ("dram.guaranteed=256MiB", "arena=sealed")
    settings = (f"tenants.acme.{each}" for each in sealed)
    with Daemon("dram.capacity=256MiB", *settings, file=False) as daemon:
        daemon.start()
        target = f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}"
        with Client(target) as client:

            def no_leases() -> bool:
                return client.admin.stats()["leases"] == 0

            async def put_for(seconds: float) -> bool:
                other = AsyncClient(target)
                try:
                    await other.register(namespace)
                    async with asyncio.timeout(seconds):
                        await other.put(namespace.id, keys, records)
                except TimeoutError:
                    await asyncio.to_thread(until, no_leases, 5.0)
                    return True
                finally:
                    await other.close()
                return False

            client.register(namespace)
            until(lambda: client.admin.stats()["dram"]["reserved_bytes"] >= 256 << 20)
            ended_early = []
            for at in range(12):
                client.admin.clear(namespace.id)
                ended_early.append(asyncio.run(put_for(0.002 + 0.004 * at)))
            assert any(ended_early)
            done = client.put(namespace.id, keys, records)
            assert done.committed + done.existing == len(keys)


def test_a_session_that_came_too_late_reads_and_is_told_at_once_that_it_cannot_write(
    daemon: Daemon, client: Client
) -> None:
    assert client.put(NAMESPACE.id, KEYS, RECORDS).committed == len(KEYS)
    large = sample_namespace("large", 4 << 20)
    client.register(large)
    records = [bytes(4 << 20)]
    target = f"unix:{daemon.socket.parent / 'acme/kvstore.sock'}"
    with ExitStack() as stack:
        refused = set()
        for number in range(7):  # each has half of what is left
            late = stack.enter_context(Client(target))
            late.register(NAMESPACE)
            late.register(large)
            assert late.get(NAMESPACE.id, KEYS) == RECORDS
            assert late.put(NAMESPACE.id, KEYS, RECORDS).existing == len(KEYS)
            began = time.monotonic()
            try:
                late.put(large.id, sample_keys(f"large {number}", 1), records, wait_s=20)
            except Unavailable as error:
                refused.add(str(error).partition("because")[0])
            assert time.monotonic() - began < 5
        assert len(refused) > 1
        keys = sample_keys("large", 1)
        assert client.put(large.id, keys, records, wait_s=5).committed == 1
