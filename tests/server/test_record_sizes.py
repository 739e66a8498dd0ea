"""Records with sizes of their own: stored, evicted, found after a kill and on another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Client, InvalidRequest, checksum
from kvstore.model.block import Group, Namespace, Part, Span
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys
from kvstore.testing.wait import until

MOST = 20_000
SPEC = Namespace(16, (Group("all", MOST, varies=True),), (("model", "sizes"),))
MIXED = Namespace(
    16, (Group("fixed", 8192), Group("varying", MOST, varies=True)), (("model", "mixed"),)
)
BLOCKS = 24


def record(index: int, nbytes: int) -> bytes:
    return bytes((index * 31 + at) % 251 for at in range(nbytes))


def sizes(count: int) -> list[int]:
    return [1 + (index * 3571) % MOST for index in range(count)]


def put(client: Client, spec: Namespace, name: str, *, durable: bool = False) -> int:
    """Store a prefix in every part; returns how many records were committed."""
    keys = sample_keys(name, BLOCKS)
    spans = [Span(Part(group, 0), 0, BLOCKS) for group in range(len(spec.groups))]
    wanted = [
        size if group.varies else group.record_nbytes
        for group in spec.groups
        for size in sizes(BLOCKS)
    ]
    grant = client.reserve(
        client.register(spec), keys, first_block=0, parent=None, spans=spans, sizes=wanted
    )
    assert grant.varies == spec.varies
    for index, (slot, nbytes) in enumerate(zip(grant.slots, wanted, strict=True)):
        if slot is not None:
            assert slot.nbytes == nbytes
            client.view(slot)[:] = record(index, nbytes)
    sums = [checksum(record(index, nbytes)) for index, nbytes in enumerate(wanted)]
    return client.commit(grant.lease_id, sums, durable=durable).committed


def check(client: Client, spec: Namespace, name: str, *, in_files: bool = False) -> int:
    """Acquire a prefix and compare every byte; returns the hit."""
    keys = sample_keys(name, BLOCKS)
    grant = client.acquire(client.register(spec), keys, wait_s=5.0, file_places=in_files)
    each = list(zip(grant.slots, grant.places or [None] * len(grant.slots), strict=True))
    for index, ((slot, place), expected) in enumerate(zip(each, grant.checksums, strict=True)):
        if slot is not None:
            data = bytes(client.view(slot))
        else:
            assert place is not None
            with open(place.path, "rb") as file:
                file.seek(place.offset)
                data = file.read(place.nbytes)
        assert data == record(index, len(data))
        assert checksum(data) == expected
    client.release(grant.lease_id)
    return grant.hit_blocks


@pytest.mark.parametrize("spec", [SPEC, MIXED], ids=["all", "mixed"])
def test_each_record_comes_back_with_its_size(spec: Namespace) -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        assert put(client, spec, "a") == BLOCKS * len(spec.groups)
        assert check(client, spec, "a") == BLOCKS
        assert put(client, spec, "a") == 0  # stored already


def test_after_a_kill_and_from_files(tmp_path: Path) -> None:
    settings = (f"file.path={tmp_path / 'kv'}", "dram.capacity=4MiB", "dram.extent=4MiB")
    with Daemon(*settings) as daemon:
        with Client(daemon.start().target) as client:
            assert put(client, SPEC, "a", durable=True) == BLOCKS
        daemon.kill()
        with Client(daemon.start().target) as client:
            assert check(client, SPEC, "a", in_files=True) == BLOCKS
            assert check(client, SPEC, "a") == BLOCKS
            for other in range(30):  # more than the arena holds
                put(client, SPEC, f"other {other}", durable=True)
            assert check(client, SPEC, "a") == BLOCKS
            assert client.admin.stats()["dram"]["evicted_blocks"] > 0


def test_another_host_gets_them_from_a_bucket(tmp_path: Path) -> None:
    shared = (f"object.url=file://{tmp_path}", "object.believed_s=1")
    with Daemon(*shared) as one:
        with Client(one.start().target) as client:
            put(client, MIXED, "a")
        assert one.stop() == 0  # uploads before it ends
    with Daemon(*shared) as two, Client(two.start().target) as client:
        client.register(MIXED)
        until(lambda: check(client, MIXED, "a") == BLOCKS)


@pytest.mark.parametrize("wrong", [[0] * BLOCKS, [MOST + 1] * BLOCKS, [5] * (BLOCKS - 1)])
def test_impossible_sizes_are_refused(wrong: list[int]) -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys, spans = sample_keys("a", BLOCKS), [Span(Part(0, 0), 0, BLOCKS)]
        with pytest.raises(InvalidRequest):
            client.reserve(
                client.register(SPEC), keys, first_block=0, parent=None, spans=spans, sizes=wrong
            )
        fixed = Namespace(16, (Group("all", 4096),), (("model", "fixed"),))
        with pytest.raises(InvalidRequest):
            client.reserve(
                client.register(fixed),
                keys,
                first_block=0,
                parent=None,
                spans=spans,
                sizes=[4095] * BLOCKS,
            )


def test_moving_them_back_to_back_is_refused_with_what_to_do() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        namespace_id, keys = client.register(SPEC), sample_keys("a", 2)
        with pytest.raises(InvalidRequest, match="acquire them"):
            client.get(namespace_id, keys)
