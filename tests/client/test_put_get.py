"""What is put comes back, byte for byte, over both data paths; what cannot be right is refused."""

import asyncio
import dataclasses
import os
import threading

import numpy as np
import pytest

from kvstore import (
    AsyncClient,
    BlockKey,
    Client,
    Group,
    InvalidRequest,
    Namespace,
    Part,
    Prefix,
    Span,
    Unavailable,
    checksum,
)
from kvstore.client.copying import Copiers
from kvstore.model.block import Grant
from kvstore.system.shared_mapping import HUGE_NBYTES
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES, sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until


def test_what_is_put_comes_back(client: Client, request: pytest.FixtureRequest) -> None:
    namespace_id = client.register(sample_namespace())
    keys = sample_keys(request.node.name, 40)
    records = sample_records(keys)
    done = client.put(namespace_id, keys, records)
    assert (done.committed, done.existing, done.refused, done.durable) == (40, 0, 0, False)
    assert client.get(namespace_id, keys) == records
    assert client.match(namespace_id, keys).hit_blocks == 40


def test_the_two_paths_see_the_same_blocks(daemon: Daemon) -> None:
    keys = sample_keys("paths", 8)
    records = sample_records(keys)
    with Client(daemon.target) as local, Client(daemon.target, arena=False) as remote:
        namespace_id = local.register(sample_namespace())
        remote.register(sample_namespace())
        local.put(namespace_id, keys[:4], records[:4])
        remote.put(namespace_id, keys[4:], records[4:], first_block=4, parent=keys[3])
        assert remote.get(namespace_id, keys) == local.get(namespace_id, keys) == records
        assert local.local
        assert not remote.local


def test_a_namespace_is_registered_when_the_daemon_asks(
    client: Client, request: pytest.FixtureRequest
) -> None:
    namespace = sample_namespace(request.node.name)
    keys = sample_keys(request.node.name, 4)

    def known() -> list[str]:
        uses = client.admin.namespaces()
        return [use.namespace.title for use in uses if use.namespace == namespace]

    assert known() == []  # and it is connected
    assert client.register(namespace, now=False) == namespace.id
    assert known() == []
    assert client.match(namespace.id, keys).hit_blocks == 0
    assert known() == [namespace.title]
    records = sample_records(keys)
    client.put(namespace.id, keys, records)
    assert client.get(namespace.id, keys) == records


def test_a_new_client_finds_what_is_stored_without_registering(daemon: Daemon) -> None:
    namespace = sample_namespace("known to the daemon")
    keys = sample_keys("known to the daemon", 4)
    with Client(daemon.target) as client:
        client.put(client.register(namespace), keys, sample_records(keys))
    with Client(daemon.target) as client:
        client.register(namespace, now=False)
        before = registrations(client)
        assert client.get(namespace.id, keys) == sample_records(keys)
        assert registrations(client) == before
        client.register(namespace)
        assert registrations(client) == before + 1, "this test would not see one"


def registrations(client: Client) -> float:
    return client.admin.stats()["totals"]["rpc_seconds"]["RegisterNamespace"]["count"]


def test_the_arena_is_mapped_where_its_huge_pages_are_mapped_whole(daemon: Daemon) -> None:
    keys = sample_keys("huge", 2)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, keys, sample_records(keys))
        grant = client.acquire(namespace_id, keys)
        for slot in grant.slots:
            assert slot is not None
            address = np.frombuffer(client.view(slot), np.uint8).ctypes.data
            assert (address - slot.offset) % HUGE_NBYTES == 0
        client.release(grant.lease_id)


def test_a_client_keeps_no_descriptor_of_the_arena(daemon: Daemon) -> None:
    def descriptors() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("kvstore-arena" in os.readlink(each) for each in links if os.path.islink(each))

    before = descriptors()  # of arenas of this process
    keys = sample_keys("no descriptor", 1)
    with Client(daemon.target) as client:
        client.put(client.register(sample_namespace()), keys, sample_records(keys))
        with open("/proc/self/maps", encoding="ascii") as file:
            assert "memfd:kvstore-arena" in file.read()
        assert descriptors() == before


def test_a_miss_is_none_and_does_not_hide_hits(
    client: Client, request: pytest.FixtureRequest
) -> None:
    namespace_id = client.register(sample_namespace())
    keys = sample_keys(request.node.name, 5)
    records = sample_records(keys)
    client.put(namespace_id, keys[:2], records[:2])
    client.put(namespace_id, keys[3:], records[3:], first_block=3, parent=keys[2])
    assert client.get(namespace_id, keys) == [*records[:2], None, *records[3:]]
    assert client.match(namespace_id, keys).hit_blocks == 2


def test_a_second_put_keeps_the_first(client: Client, request: pytest.FixtureRequest) -> None:
    namespace_id = client.register(sample_namespace())
    keys = sample_keys(request.node.name, 3)
    records = sample_records(keys)
    client.put(namespace_id, keys, records)
    again = client.put(namespace_id, keys, [bytes(RECORD_NBYTES)] * 3)
    assert (again.committed, again.existing) == (0, 3)
    assert client.get(namespace_id, keys) == records


def test_a_durable_put_says_so(client: Client, request: pytest.FixtureRequest) -> None:
    namespace_id = client.register(sample_namespace())
    keys = sample_keys(request.node.name, 3)
    assert client.put(namespace_id, keys, sample_records(keys), durable=True).durable


def test_any_contiguous_buffer_can_be_put(client: Client, request: pytest.FixtureRequest) -> None:
    namespace_id = client.register(sample_namespace("buffers", 4096))
    keys = sample_keys(request.node.name, 3)
    array = np.arange(1024, dtype=np.float32)
    records = [bytearray(b"x" * 4096), memoryview(array), array.tobytes()]
    client.put(namespace_id, keys, records)
    assert client.get(namespace_id, keys) == [bytes(b"x" * 4096), array.tobytes(), array.tobytes()]


def test_batches_larger_than_a_window_are_cut(
    client: Client, request: pytest.FixtureRequest
) -> None:
    namespace_id = client.register(sample_namespace("small", 128))
    keys = sample_keys(request.node.name, 2500)
    records = sample_records(keys, 128)
    assert client.put(namespace_id, keys, records).committed == 2500
    assert client.get(namespace_id, keys) == records
    assert client.match(namespace_id, keys).hit_blocks == 2500


def test_records_larger_than_a_chunk_come_back(
    client: Client, request: pytest.FixtureRequest
) -> None:
    nbytes = (5 << 20) + 3
    namespace_id = client.register(sample_namespace("large", nbytes))
    keys = sample_keys(request.node.name, 3)
    records = sample_records(keys, nbytes)
    assert client.put(namespace_id, keys, records).refused == 0
    assert client.get(namespace_id, keys) == records


def test_parts_are_stored_apart(client: Client, request: pytest.FixtureRequest) -> None:
    groups = (Group("full", 4096, shards=2), Group("window", 512, window_tokens=32))
    namespace = Namespace(block_tokens=16, groups=groups, identity=(("model", "parts"),))
    namespace_id = client.register(namespace)
    keys = sample_keys(request.node.name, 4)
    for shard in (0, 1):
        client.put(namespace_id, keys, [bytes([shard]) * 4096] * 4, shard=shard)
    assert client.match(namespace_id, keys).hit_blocks == 0
    client.put(namespace_id, keys[2:], [b"w" * 512] * 2, group=1, first_block=2, parent=keys[1])
    assert client.match(namespace_id, keys).hit_blocks == 4
    assert client.get(namespace_id, keys, shard=1) == [bytes([1]) * 4096] * 4
    assert client.get(namespace_id, keys, group=1) == [None, None, b"w" * 512, b"w" * 512]


@pytest.mark.parametrize(
    "change",
    [
        {"block_tokens": 32},
        {"fidelity": "int8"},
        {"groups": (Group("full", RECORD_NBYTES, window_tokens=64),)},
        {"groups": (Group("full", RECORD_NBYTES, shards=2),)},
        {"groups": (Group("half", RECORD_NBYTES),)},
        {"identity": (("model", "sample"), ("weights", "00"))},
        {"identity": (("model", "sample2"),)},
    ],
    ids=["block_tokens", "fidelity", "window", "shards", "group", "weights", "model"],
)
def test_a_namespace_that_differs_in_one_field_misses(
    client: Client, request: pytest.FixtureRequest, change: dict[str, object]
) -> None:
    namespace = sample_namespace()
    other = dataclasses.replace(namespace, **change)  # type: ignore[arg-type]
    namespace_id, other_id = client.register(namespace), client.register(other)
    keys = sample_keys(request.node.name, 3)
    client.put(namespace_id, keys, sample_records(keys))
    assert client.get(other_id, keys) == [None] * 3
    assert client.match(other_id, keys).hit_blocks == 0


def test_deleted_and_cleared_blocks_are_gone(
    client: Client, request: pytest.FixtureRequest
) -> None:
    namespace_id = client.register(sample_namespace(f"gone {request.node.name}"))
    keys = sample_keys(request.node.name, 6)
    records = sample_records(keys)
    client.put(namespace_id, keys, records)
    assert client.admin.delete(namespace_id, keys[4:]) == 2
    assert client.get(namespace_id, keys) == [*records[:4], None, None]
    assert {item.key for item in client.admin.scan(namespace_id)} == set(keys[:4])
    assert client.admin.clear(namespace_id) == 4
    assert client.get(namespace_id, keys) == [None] * 6


def test_scan_pages_through_everything(client: Client, request: pytest.FixtureRequest) -> None:
    namespace_id = client.register(sample_namespace(f"scan {request.node.name}", 64))
    keys = sample_keys(request.node.name, 2100)
    client.put(namespace_id, keys, sample_records(keys, 64))
    items = [item.key for item in client.admin.scan(namespace_id)]
    assert len(items) == len(keys)
    assert set(items) == set(keys)
    assert [item.key for item in client.admin.scan(namespace_id, limit=1500)] == items[:1500]


def test_bytes_that_changed_in_the_arena_are_a_miss_and_dropped(daemon: Daemon) -> None:
    keys = sample_keys("changed", 4)
    records = sample_records(keys)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        # Durable: else the daemon may find the damage first, as it verifies what it writes.
        assert client.put(namespace_id, keys, records, durable=True).durable
        grant = client.acquire(namespace_id, keys)
        assert grant.slots[2] is not None
        client.view(grant.slots[2])[17] ^= 1
        client.release(grant.lease_id)
        assert client.get(namespace_id, keys) == [*records[:2], None, records[3]]
        assert client.corrupt_blocks == 1
        assert client.match(namespace_id, keys).resident_blocks == 2, "the wrong copy has left"
        assert client.get(namespace_id, keys, wait_s=5) == records, "the frame's is right"


def test_get_into_fills_the_callers_memory(client: Client, request: pytest.FixtureRequest) -> None:
    namespace_id = client.register(sample_namespace())
    keys = sample_keys(request.node.name, 5)
    records = sample_records(keys)
    client.put(namespace_id, keys[:2], records[:2])
    client.put(namespace_id, keys[3:], records[3:], first_block=3, parent=keys[2])
    targets = [bytearray(RECORD_NBYTES) for _ in keys]
    assert client.get_into(namespace_id, keys, targets) == [True, True, False, True, True]
    del targets[2]
    assert targets == [*records[:2], *records[3:]]
    assert client.get_into(namespace_id, [], []) == []
    with pytest.raises(InvalidRequest, match="written to"):
        client.get_into(namespace_id, keys[:1], [bytes(RECORD_NBYTES)])
    with pytest.raises(InvalidRequest, match="one piece"):
        client.get_into(namespace_id, keys[:1], [bytearray(RECORD_NBYTES - 1)])


def test_get_into_verifies_the_copy_unless_told_not_to(daemon: Daemon) -> None:
    keys = sample_keys("changed too", 3)
    records = sample_records(keys)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        assert client.put(namespace_id, keys, records, durable=True).durable
        grant = client.acquire(namespace_id, keys)
        assert grant.slots[1] is not None
        client.view(grant.slots[1])[17] ^= 1
        client.release(grant.lease_id)
        targets = [bytearray(RECORD_NBYTES) for _ in keys]
        assert client.get_into(namespace_id, keys, targets, verify=False) == [True] * 3
        assert targets[1] != records[1]
        assert client.get_into(namespace_id, keys, targets) == [True, False, True]
        assert client.corrupt_blocks == 1
        assert client.match(namespace_id, keys).resident_blocks == 1


def test_a_cancelled_copy_keeps_its_slots_until_its_threads_have_ended() -> None:
    """Else a late thread writes into slots that are somebody else's by then."""
    copiers = Copiers()
    gate, ended = threading.Event(), threading.Event()

    def copy(_: int) -> None:
        gate.wait(10)
        ended.set()

    async def cancelled() -> bool:
        task = asyncio.create_task(copiers.map(copy, [1]))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        early = task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return early

    assert not asyncio.run(cancelled())
    assert ended.is_set()
    copiers.close()


def test_leases_are_read_in_place(daemon: Daemon) -> None:
    keys = sample_keys("in place", 3)
    records = sample_records(keys)
    span = Span(Part(0, 0), 0, 3)
    with Client(daemon.target) as writer, Client(daemon.target) as reader:
        namespace_id = writer.register(sample_namespace())
        reader.register(sample_namespace())
        grant = writer.reserve(namespace_id, keys, first_block=0, parent=None, spans=[span])
        for slot, record in zip(grant.slots, records, strict=True):
            assert slot is not None
            writer.view(slot)[:] = record
        writer.commit(grant.lease_id, [checksum(record) for record in records])
        lease = reader.acquire(namespace_id, keys)
        assert lease.hit_blocks == 3
        assert [bytes(reader.view(slot)) for slot in lease.slots if slot] == records
        assert list(lease.checksums) == [checksum(record) for record in records]
        assert reader.release(lease.lease_id) == [True]


def test_a_second_release_is_false_and_harmless(daemon: Daemon) -> None:
    keys = sample_keys("twice", 2)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, keys, sample_records(keys))
        lease = client.acquire(namespace_id, keys, readers=2)
        assert client.release(lease.lease_id) == [True]
        assert client.release(lease.lease_id) == [True]
        assert client.release(lease.lease_id, 12345) == [False, False]
        assert client.get(namespace_id, keys) == sample_records(keys)


@pytest.mark.parametrize("nbytes", [RECORD_NBYTES - 1, RECORD_NBYTES + 1, 0])
def test_a_record_of_the_wrong_size_is_refused(client: Client, nbytes: int) -> None:
    namespace_id = client.register(sample_namespace())
    keys = sample_keys("size", 2)
    before = client.admin.stats()["blocks"]
    with pytest.raises(InvalidRequest, match=str(RECORD_NBYTES)):
        client.put(namespace_id, keys, [bytes(RECORD_NBYTES), bytes(nbytes)])
    assert client.admin.stats()["blocks"] == before


def test_bad_arguments_are_refused_before_anything_is_sent(client: Client) -> None:
    namespace = sample_namespace()
    namespace_id = client.register(namespace)
    keys = sample_keys("bad", 2)
    records = sample_records(keys)
    short = BlockKey(b"short")
    strided = memoryview(np.zeros(2 * RECORD_NBYTES, np.uint8))[::2]
    before = client.admin.stats()
    with pytest.raises(InvalidRequest, match="32 bytes"):
        client.get(namespace_id, [keys[0], short])
    with pytest.raises(InvalidRequest, match="32 bytes"):
        client.put(namespace_id, keys, records, parent=short)
    with pytest.raises(InvalidRequest, match="1 records for 2 keys"):
        client.put(namespace_id, keys, records[:1])
    with pytest.raises(InvalidRequest, match="in one piece"):
        client.put(namespace_id, keys[:1], [strided])
    with pytest.raises(InvalidRequest, match="shard"):
        client.put(namespace_id, keys, records, shard=1)
    with pytest.raises(InvalidRequest, match="unknown namespace"):
        client.get(sample_namespace("never registered").id, keys)
    with pytest.raises(InvalidRequest, match="8193 keys"):
        client.match(namespace_id, [keys[0]] * 8193)
    assert client.admin.stats()["blocks"] == before["blocks"]
    assert client.admin.stats()["leases"] == before["leases"] == 0


def test_a_client_without_the_arena_cannot_lease(daemon: Daemon) -> None:
    with Client(daemon.target, arena=False) as client:
        namespace_id = client.register(sample_namespace())
        with pytest.raises(InvalidRequest, match="arena"):
            client.acquire(namespace_id, sample_keys("no arena", 1))


def test_many_calls_at_once_share_one_client(daemon: Daemon) -> None:
    async def run() -> None:
        client = AsyncClient(daemon.target)
        try:
            namespace_id = await client.register(sample_namespace())

            async def one(index: int) -> None:
                keys = sample_keys(f"many {index}", 5)
                await client.put(namespace_id, keys, sample_records(keys))
                assert await client.get(namespace_id, keys) == sample_records(keys)

            await asyncio.gather(*(one(index) for index in range(20)))
        finally:
            await client.close()

    asyncio.run(run())


def test_a_closed_client_refuses_calls(daemon: Daemon) -> None:
    client = Client(daemon.target)
    client.connect()
    client.close()
    client.close()
    with pytest.raises(InvalidRequest, match="closed"):
        client.admin.stats()


def test_what_has_to_come_up_first_comes_in_pieces(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some blocks are in the arena, some in files only, some nowhere; the pieces are small."""
    monkeypatch.setattr("kvstore.client.in_place.PIECE_NBYTES", 3 * RECORD_NBYTES)
    keys = sample_keys("pieces", 41)
    records = sample_records(keys)
    cold, warm, unknown = keys[:30], keys[30:38], keys[38:]
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, cold, records[:30], durable=True)
        assert client.hints.demote(Prefix(namespace_id, cold)).done_blocks == 30
        client.put(namespace_id, warm, records[30:38], parent=cold[-1], first_block=30)
        assert client.match(namespace_id, cold).resident_blocks == 0
        targets = np.zeros((len(keys), RECORD_NBYTES), np.uint8)
        found = client.get_into(namespace_id, keys, list(targets), wait_s=10.0)
        assert found == [True] * 38 + [False] * len(unknown)
        assert targets[:38].tobytes() == b"".join(records[:38])
        assert not targets[38:].any()
        assert client.admin.stats()["leases"] == 0
        client.hints.demote(Prefix(namespace_id, keys[:38]))
        assert client.get(namespace_id, keys, wait_s=10.0) == [*records[:38], None, None, None]


def test_a_piece_that_fails_ends_the_others(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.in_place.PIECE_NBYTES", RECORD_NBYTES)
    keys = sample_keys("failing piece", 12)
    asked = []

    async def fail_later(client: AsyncClient, *args: object, **options: object) -> Grant:
        asked.append(args)
        if len(asked) == 6:
            raise Unavailable("as if the daemon had gone")
        return await acquire(client, *args, **options)

    acquire = AsyncClient.acquire
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, keys, sample_records(keys), durable=True)
        client.hints.demote(Prefix(namespace_id, keys))
        monkeypatch.setattr(AsyncClient, "acquire", fail_later)
        with pytest.raises(Unavailable, match="as if"):
            client.get(namespace_id, keys, wait_s=10.0)
        monkeypatch.undo()
        until(lambda: client.admin.stats()["leases"] == 0)
        assert client.get(namespace_id, keys, wait_s=10.0) == sample_records(keys)


def test_a_cold_get_finds_all_in_an_arena_that_is_hardly_larger_than_its_pieces() -> None:
    """What is in flight stays within what leases may hold, or blocks would look missing."""
    nbytes, blocks = 4 << 20, 24
    spec = Namespace(16, (Group("all", nbytes),), (("get", "tight"),))
    keys = sample_keys("tight", blocks)
    rows = np.random.default_rng(3).integers(0, 256, (blocks, nbytes), np.uint8)
    settings = ("dram.capacity=88MiB", "dram.extent=88MiB", "limits.leased_fraction=0.3")
    with Daemon(*settings) as daemon, Client(daemon.start().target) as client:
        namespace_id = client.register(spec)
        until(lambda: sum(map(len, client.extents().values())) == 88 << 20)
        for key, row in zip(keys, rows, strict=True):
            client.put(namespace_id, [key], [row], durable=True)
        targets = np.zeros_like(rows)
        assert client.get_into(namespace_id, keys, list(targets), wait_s=30.0) == [True] * blocks
        assert np.array_equal(targets, rows)
