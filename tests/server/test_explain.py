"""Every reason for which a hit ends, produced in a real daemon and told by it."""

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvstore import Client, Group, Namespace, Part, Slot, Span
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.outcome import Outcome, Reason
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

KEYS = sample_keys("explained", 16)
WHOLE = Part(0, 0)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that the test may do anything to."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target, name="engine") as client:
        yield client


def put(client: Client, keys: list[BlockKey], namespace: Namespace | None = None) -> NamespaceId:
    namespace_id = client.register(namespace or sample_namespace())
    client.put(namespace_id, keys, sample_records(keys), durable=True)
    return namespace_id


def ask(
    client: Client, namespace_id: NamespaceId, keys: list[BlockKey], wait_s: float = 5.0
) -> Outcome:
    """Acquire, release, and return what the daemon remembers of it."""
    name = secrets.token_hex(4)
    grant = client.acquire(namespace_id, keys, wait_s=wait_s, request_id=name)
    if grant.lease_id:
        assert client.release(grant.lease_id) == [True]
    (outcome,) = client.admin.outcomes(name)
    assert outcome.request_id == name
    assert outcome.hit_blocks == grant.hit_blocks
    return outcome


def ended(outcome: Outcome) -> tuple[int, Reason, int]:
    """Return the hit, why it ended and at which block."""
    assert outcome.ending is not None
    return outcome.hit_blocks, outcome.ending.reason, outcome.ending.block


def test_a_complete_hit_has_no_ending_and_says_where_it_came_from(client: Client) -> None:
    outcome = ask(client, put(client, KEYS), KEYS)
    assert outcome.ending is None
    assert (outcome.asked_blocks, outcome.hit_blocks, outcome.file_blocks) == (16, 16, 0)
    assert (outcome.client, outcome.asks, outcome.lease) == ("engine", 1, "held")


def test_never_stored(client: Client) -> None:
    namespace_id = put(client, KEYS[:5])
    assert ended(ask(client, namespace_id, KEYS)) == (5, Reason.NEVER_STORED, 5)


def test_deleted_and_how_long_ago(client: Client) -> None:
    namespace_id = put(client, KEYS)
    client.admin.delete(namespace_id, KEYS[3:4])
    outcome = ask(client, namespace_id, KEYS)
    assert ended(outcome) == (3, Reason.DELETED, 3)
    assert outcome.ending is not None
    assert 0 < outcome.ending.left_s < 60


def test_cleared(client: Client) -> None:
    namespace_id = put(client, KEYS)
    client.admin.clear(namespace_id)
    assert ended(ask(client, namespace_id, KEYS)) == (0, Reason.CLEARED, 0)


def test_evicted_because_the_file_tier_was_at_its_cap() -> None:
    with Daemon("dram.capacity=1MiB", "file.capacity=2MiB", "file.segment=1MiB") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            namespace_id = put(client, KEYS)
            for other in range(12):
                put(client, sample_keys(f"other {other}", 16))
            hit, reason, block = ended(ask(client, namespace_id, KEYS))
            assert reason is Reason.EVICTED
            assert hit == block < 16


def test_lost_because_the_arena_was_full_and_there_is_no_file_tier() -> None:
    with Daemon("dram.capacity=1MiB", file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            namespace_id = put(client, KEYS)
            for other in range(4):
                put(client, sample_keys(f"other {other}", 16))
            hit, reason, block = ended(ask(client, namespace_id, KEYS))
            assert reason is Reason.LOST
            assert hit == block < 16


def test_still_being_written(client: Client) -> None:
    namespace_id = put(client, KEYS[:4])
    spans = [Span(WHOLE, 0, 4)]
    writing = client.reserve(
        namespace_id, KEYS[4:8], first_block=4, parent=KEYS[3], spans=spans, wait_s=1.0
    )
    assert ended(ask(client, namespace_id, KEYS)) == (4, Reason.BEING_WRITTEN, 4)
    reasons = [each.reason for each in client.admin.explain(namespace_id, KEYS).ranges]
    assert reasons == [None, Reason.BEING_WRITTEN, Reason.NEVER_STORED]
    client.release(writing.lease_id)
    assert ended(ask(client, namespace_id, KEYS)) == (4, Reason.NEVER_STORED, 4)


def test_not_up_by_the_deadline(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        put(client, KEYS)
    assert daemon.stop() == 0
    daemon.start()
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        hit, reason, block = ended(ask(client, namespace_id, KEYS, wait_s=0.0))
        assert (reason, block) == (Reason.DEADLINE, hit)
        assert ask(client, namespace_id, KEYS).ending is None


def test_wrong_bytes_that_a_reader_found_and_no_other_copy_has_right() -> None:
    with Daemon(file=False) as daemon, Client(daemon.start().target, name="engine") as client:
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, KEYS, sample_records(KEYS))
        spoil(client, namespace_id, 7)
        assert client.get(namespace_id, KEYS)[7] is None
        assert ended(ask(client, namespace_id, KEYS)) == (7, Reason.CORRUPT, 7)


def test_wrong_bytes_in_memory_leave_the_copy_on_disk(client: Client) -> None:
    namespace_id = put(client, KEYS)
    spoil(client, namespace_id, 7)
    assert client.get(namespace_id, KEYS)[7] is None
    outcome = ask(client, namespace_id, KEYS)
    assert (outcome.ending, outcome.hit_blocks) == (None, 16)
    assert client.get(namespace_id, KEYS) == sample_records(KEYS)


def spoil(client: Client, namespace_id: NamespaceId, block: int) -> None:
    """Flip a bit of a block in memory, as a process with the arena mapped can."""
    grant = client.acquire(namespace_id, KEYS)
    slot = grant.slots[block]
    assert slot is not None
    client.view(slot)[0] ^= 1
    client.release(grant.lease_id)


def segments(daemon: Daemon) -> list[Path]:
    return [file for file in (daemon.directory / "file").iterdir() if file.stat().st_size > 1 << 16]


def test_wrong_bytes_found_on_their_way_up_are_told_to_the_request_that_found_them(
    daemon: Daemon,
) -> None:
    with Client(daemon.target) as client:
        put(client, KEYS)
    assert daemon.stop() == 0
    (segment,) = segments(daemon)
    content = bytearray(segment.read_bytes())
    at = content.index(sample_records(KEYS[9:10])[0])
    content[at + 100] ^= 1
    segment.write_bytes(content)
    daemon.start()
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        assert ended(ask(client, namespace_id, KEYS)) == (9, Reason.CORRUPT, 9)
        assert client.admin.stats()["totals"]["corrupt_blocks"] == {"promote": 1}


def test_a_disk_that_fails_to_read(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        put(client, KEYS)
    assert daemon.stop() == 0
    daemon.start()
    (segment,) = segments(daemon)
    segment.unlink()
    segment.symlink_to(segment)  # a loop: opening it is an error now
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace())
        assert ended(ask(client, namespace_id, KEYS)) == (0, Reason.READ_FAILED, 0)
        assert client.admin.stats()["file"]["failed_reads"] > 0


def test_no_room_in_the_arena_to_bring_a_block_up() -> None:
    """Two small leases in the middle of the arena leave no gap for a large record."""
    large, nbytes = sample_keys("large", 1), 5 << 19
    with Daemon("dram.capacity=4MiB", "limits.leased_fraction=1") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            large_id = client.register(sample_namespace("large", nbytes))
            client.put(large_id, large, sample_records(large, nbytes), durable=True)
        daemon.stop()
        daemon.start()
        with Client(daemon.target) as client:
            client.register(sample_namespace("large", nbytes))
            keys = sample_keys("small", 200)
            namespace_id = put(client, keys)
            grant = client.acquire(namespace_id, keys, spans=[Span(WHOLE, 0, len(keys))])
            client.release(grant.lease_id)
            middle = min(range(len(keys)), key=lambda at: distance(grant.slots[at], 2 << 20))
            client.acquire(namespace_id, keys, spans=[Span(WHOLE, middle, middle + 1)])
            assert ended(ask(client, large_id, large)) == (0, Reason.NO_ROOM, 0)


def distance(slot: Slot | None, offset: int) -> int:
    assert slot is not None
    return abs(slot.offset - offset)


def test_over_the_bound_of_leased_bytes() -> None:
    with Daemon("dram.capacity=1MiB", "limits.leased_fraction=0.2") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            namespace_id = put(client, KEYS)
            other = put(client, sample_keys("other", 8))
            # More than may be leased at all: a shorter hit. Then nothing is left for another.
            assert ended(ask(client, namespace_id, KEYS)) == (10, Reason.LEASED_BYTES, 10)
            client.acquire(namespace_id, KEYS)
            grant = client.acquire(other, sample_keys("other", 8), request_id="estimate")
            assert not grant.leased
            for _ in range(2):
                client.acquire(other, sample_keys("other", 8), request_id="estimate")
            (outcome,) = client.admin.outcomes("estimate")
            assert ended(outcome) == (8, Reason.LEASED_BYTES, 8)
            assert (outcome.asks, outcome.lease) == (3, "")


def test_another_namespace_of_the_same_model_and_where_it_differs(client: Client) -> None:
    stored = sample_namespace()
    put(client, KEYS, stored)
    asking = replace(
        stored, block_tokens=32, identity=(*stored.identity, ("kv_dtype", "fp8/bfloat16"))
    )
    stranger = replace(asking, identity=(("model", "another"),))
    outcome = ask(client, client.register(asking), KEYS)
    assert ended(outcome) == (0, Reason.OTHER_NAMESPACE, 0)
    assert outcome.ending is not None
    assert outcome.ending.differs == (
        "block_tokens: 32 here, 16 there",
        "kv_dtype: fp8/bfloat16 here, - there",
    )
    assert ended(ask(client, client.register(stranger), KEYS))[1] is Reason.NEVER_STORED


def test_a_window_group_that_ends_a_hit_is_named(client: Client) -> None:
    groups = (Group("full", 20_000), Group("window", 20_000, window_tokens=40))
    namespace_id = client.register(Namespace(16, groups, (("model", "window"),)))
    client.put(namespace_id, KEYS[:12], sample_records(KEYS[:12]))
    client.put(namespace_id, KEYS[:6], sample_records(KEYS[:6]), group=1)
    outcome = ask(client, namespace_id, KEYS)
    assert ended(outcome) == (6, Reason.NEVER_STORED, 11)
    assert outcome.ending is not None
    assert outcome.ending.group == "window"


def test_a_lease_that_ran_out_is_told(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("limits.lease_s=0.5")
    with Client(daemon.target) as client:
        namespace_id = put(client, KEYS[:2])
        grant = client.acquire(namespace_id, KEYS[:2], request_id="slow")
        while client.release(grant.lease_id) == [True]:
            grant = client.acquire(namespace_id, KEYS[:2], request_id="slow")
            while not client.admin.stats()["dram"]["limbo_bytes"]:
                pass
        (outcome,) = client.admin.outcomes("slow")
        assert outcome.lease == "expired"
        assert outcome.asks == 2


def test_what_is_remembered_is_bounded(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("limits.outcomes_max=3", "limits.departed_keys_max=2")
    with Client(daemon.target) as client:
        namespace_id = put(client, KEYS)
        for number in range(5):
            client.release(client.acquire(namespace_id, KEYS, request_id=f"r{number}").lease_id)
        assert [each.request_id for each in client.admin.outcomes()] == ["r4", "r3", "r2"]
        assert [each.request_id for each in client.admin.outcomes(limit=1)] == ["r4"]
        client.admin.delete(namespace_id, KEYS[:4])
        reasons = [
            (each.begin, each.reason) for each in client.admin.explain(namespace_id, KEYS).ranges
        ]
        assert reasons == [(0, Reason.NEVER_STORED), (2, Reason.DELETED), (4, None)]


def test_requests_without_an_id_are_remembered_one_by_one(client: Client) -> None:
    namespace_id = put(client, KEYS)
    for _ in range(2):
        client.release(client.acquire(namespace_id, KEYS).lease_id)
    assert [(each.request_id, each.asks) for each in client.admin.outcomes()] == [("", 1), ("", 1)]


def test_a_prefix_is_explained_range_by_range(client: Client) -> None:
    namespace_id = put(client, KEYS[:10])
    client.admin.delete(namespace_id, KEYS[6:8])
    found = client.admin.explain(namespace_id, KEYS)
    assert [(r.begin, r.end, r.dram, r.file, r.reason) for r in found.ranges] == [
        (0, 6, True, True, None),
        (6, 8, False, False, Reason.DELETED),
        (8, 10, True, True, None),
        (10, 16, False, False, Reason.NEVER_STORED),
    ]
    assert (found.hit_blocks, found.resident_blocks) == (6, 6)
    assert found.ending is not None
    assert (found.ending.block, found.ending.reason) == (6, Reason.DELETED)


def test_namespaces_are_listed_also_those_only_found_on_disk(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        namespace_id = put(client, KEYS)
        assert [use[:3] for use in client.admin.namespaces()] == [
            (namespace_id, sample_namespace(), 16)
        ]
    daemon.stop()
    daemon.start()
    with Client(daemon.target) as client:
        assert [use[:3] for use in client.admin.namespaces()] == [
            (namespace_id, sample_namespace(), 16)
        ]
    daemon.stop()
    for file in (daemon.directory / "file").glob("*.namespace"):
        file.unlink()
    daemon.start()
    with Client(daemon.target) as client:
        assert [use[:3] for use in client.admin.namespaces()] == [(namespace_id, None, 16)]


def test_a_request_id_is_cut_by_the_client_and_refused_by_the_daemon(
    daemon: Daemon, client: Client
) -> None:
    namespace_id = put(client, KEYS)
    client.release(client.acquire(namespace_id, KEYS, request_id="x" * 1000).lease_id)
    assert client.admin.outcomes()[0].request_id == "x" * 256
    with grpc.insecure_channel(daemon.target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub = rpc.KVStoreStub(channel)
        stub.OpenSession(pb.OpenSessionRequest(rpc_version=RPC_VERSION))
        with pytest.raises(grpc.RpcError, match="256"):
            stub.Acquire(pb.AcquireRequest(session=1, keys=KEYS[0], request_id="x" * 257))
