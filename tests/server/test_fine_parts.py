"""Lossy namespaces: base parts are hits, fine parts come along, and make room first.

Blocks here have a pattern of bytes by (writer, block, part), so that a base and a fine part of two
writers can be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore import Client, InvalidRequest, checksum
from kvstore.model.block import BlockKey, Grant, Group, Namespace, Part, Span
from kvstore.model.outcome import Reason
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys
from kvstore.testing.wait import until

EXACT, BASE, FINE = 30_000, 12_000, 8_000
BASE_PART, FINE_PART = Part(0, 0), Part(1, 0)
SPEC = Namespace(
    16,
    (
        Group("all", EXACT, varies=True),
        Group("all.fine", FINE, refines=0, base_nbytes=BASE),
    ),
    (("model", "lossy"),),
    fidelity="ep",
)
BLOCKS = 24


def pattern(writer: str, block: int, part: Part, nbytes: int) -> bytes:
    seed = checksum(f"{writer} {block} {part}".encode())
    return (seed.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


def base_size(block: int) -> int:
    return EXACT if block == 0 else BASE  # the first block is exact


def spans(blocks: int = BLOCKS) -> list[Span]:
    return [Span(BASE_PART, 0, blocks), Span(FINE_PART, 0, blocks)]


@dataclass
class Writer:
    """Stores prefixes with its own bytes."""

    client: Client
    name: str = "one"
    sums: list[int] = field(default_factory=list)

    def reserve(self, keys: Sequence[BlockKey], *, refined: bool = False) -> Grant:
        sizes = [base_size(block) for block in range(len(keys))] + [FINE] * len(keys)
        grant = self.client.reserve(
            self.client.register(SPEC),
            keys,
            first_block=0,
            parent=None,
            spans=spans(len(keys)),
            sizes=sizes,
            refined=refined,
        )
        self.sums = []
        for at, (slot, nbytes) in enumerate(zip(grant.slots, sizes, strict=True)):
            part = BASE_PART if at < len(keys) else FINE_PART
            data = pattern(self.name, at % len(keys), part, nbytes)
            self.sums.append(checksum(data))
            if slot is not None:
                self.client.view(slot)[:] = data
        return grant

    def put(
        self, keys: Sequence[BlockKey], *, durable: bool = False, refined: bool = False
    ) -> tuple[int, int]:
        """Return how many records were new, and how many others had stored."""
        grant = self.reserve(keys, refined=refined)
        done = self.client.commit(grant.lease_id, self.sums, durable=durable)
        if durable:
            assert done.durable
        return done.committed, done.existing


def read(
    client: Client,
    keys: Sequence[BlockKey],
    *,
    writers: Sequence[str] = ("one",),
    refined: bool = False,
    wait_s: float = 5.0,
    request_id: str = "",
) -> tuple[int, int]:
    """Return the hit and the fine parts that came with it; a block has one writer."""
    grant = client.acquire(
        client.register(SPEC), keys, refined=refined, wait_s=wait_s, request_id=request_id
    )
    whose: dict[int, str] = {}
    fine = at = 0
    for part, begin, end in grant.spans:
        for block in range(begin, end):
            slot, expected = grant.slots[at], grant.checksums[at]
            at += 1
            if slot is None:
                assert part == FINE_PART
                continue
            data = bytes(client.view(slot))
            assert checksum(data) == expected
            (writer,) = [w for w in writers if data == pattern(w, block, part, len(data))]
            assert whose.setdefault(block, writer) == writer, "planes of two encodings"
            fine += part == FINE_PART
    assert client.release(grant.lease_id) == [True]
    return grant.hit_blocks, fine


def without_fine(client: Client, keys: Sequence[BlockKey], name: str = "one") -> None:
    """Store base parts alone."""
    data = [pattern(name, block, BASE_PART, base_size(block)) for block in range(len(keys))]
    grant = client.reserve(
        client.register(SPEC),
        keys,
        first_block=0,
        parent=None,
        spans=[Span(BASE_PART, 0, len(keys))],
        sizes=[len(each) for each in data],
    )
    for slot, each in zip(grant.slots, data, strict=True):
        assert slot is not None
        client.view(slot)[:] = each
    client.commit(grant.lease_id, [checksum(each) for each in data])


def test_a_group_refines_only_what_it_can() -> None:
    base = Group("all", EXACT, varies=True)
    for fidelity, fine in (
        ("exact", Group("fine", FINE, refines=0, base_nbytes=BASE)),
        ("ep", Group("fine", FINE, refines=2, base_nbytes=BASE)),
        ("ep", Group("fine", FINE, refines=1, base_nbytes=BASE)),
        ("ep", Group("fine", FINE, refines=-2, base_nbytes=BASE)),
        ("ep", Group("fine", FINE, refines=0, base_nbytes=0)),
        ("ep", Group("fine", FINE, refines=0, base_nbytes=EXACT + 1)),
        ("ep", Group("fine", FINE, shards=2, refines=0, base_nbytes=BASE)),
        ("ep", Group("fine", FINE, window_tokens=64, refines=0, base_nbytes=BASE)),
    ):
        with pytest.raises(InvalidRequest):
            Namespace(16, (base, fine), (("model", "m"),), fidelity=fidelity)
    twice = Group("fine", FINE, refines=0, base_nbytes=BASE)
    with pytest.raises(InvalidRequest):
        Namespace(16, (base, twice, twice), (("model", "m"),), fidelity="ep")


def test_a_namespace_comes_back_from_its_text() -> None:
    assert Namespace.from_json(SPEC.to_json()) == SPEC
    assert Namespace.from_json(SPEC.to_json()).fine == (1,)
    plain = Namespace(16, (Group("all", EXACT),), (("model", "m"),))
    assert "refines" not in plain.to_json()  # the ids of namespaces without it stay


def test_both_parts_come_back_and_the_first_block_is_exact() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("both", BLOCKS)
        assert Writer(client).put(keys) == (2 * BLOCKS - 1, 0)
        assert read(client, keys) == (BLOCKS, BLOCKS - 1)
        assert read(client, keys, refined=True) == (BLOCKS, BLOCKS - 1)
        assert Writer(client).put(keys) == (0, BLOCKS)


def test_a_base_without_its_fine_part_is_a_hit_unless_somebody_insists() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("base", BLOCKS)
        without_fine(client, keys)
        namespace_id = client.register(SPEC)
        assert client.match(namespace_id, keys).hit_blocks == BLOCKS
        assert client.match(namespace_id, keys, refined=True).hit_blocks == 1
        assert read(client, keys, request_id="coarse") == (BLOCKS, 0)
        assert read(client, keys, refined=True, request_id="insists") == (1, 0)
        (outcome,) = client.admin.outcomes("insists")
        assert outcome.ending is not None
        assert outcome.ending.reason is Reason.COARSE
        (outcome,) = client.admin.outcomes("coarse")
        assert outcome.base_blocks == BLOCKS - 1
        assert outcome.ending is None
        totals = client.admin.stats()["totals"]
        assert totals["base_hit_blocks"] == BLOCKS - 1


def test_a_fine_part_never_joins_the_base_of_another_writer() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("race", BLOCKS)
        one, two = Writer(client, "one"), Writer(client, "two")
        first, second = one.reserve(keys), two.reserve(keys)
        assert client.commit(second.lease_id, two.sums).committed == 2 * BLOCKS - 1
        assert client.commit(first.lease_id, one.sums).committed == 0
        assert read(client, keys, writers=("one", "two")) == (BLOCKS, BLOCKS - 1)


def test_a_fine_part_gets_no_slot_where_the_base_is_stored() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("stored", BLOCKS)
        without_fine(client, keys, "two")
        grant = Writer(client).reserve(keys)
        assert not any(grant.slots)
        assert not grant.refused
        assert read(client, keys, writers=("one", "two")) == (BLOCKS, 0)


def test_a_refined_put_replaces_a_base_and_its_fine_part_together(tmp_path: Path) -> None:
    with Daemon(f"file.path={tmp_path / 'kv'}") as daemon:
        keys = sample_keys("replaced", BLOCKS)
        with Client(daemon.start().target) as client:
            without_fine(client, keys, "two")
            assert client.admin.flush()
            assert Writer(client).put(keys, refined=True) == (2 * (BLOCKS - 1), 1)
            found = read(client, keys, writers=("one", "two"), refined=True)
            assert found == (BLOCKS, BLOCKS - 1)
            assert client.admin.flush()
        daemon.kill()
        with Client(daemon.start().target) as client:  # file.fidelity=base
            assert read(client, keys, writers=("one", "two")) == (BLOCKS, 0)


def test_a_fine_part_alone_is_not_published() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("alone", BLOCKS)
        grant = client.reserve(
            client.register(SPEC),
            keys,
            first_block=0,
            parent=None,
            spans=[Span(FINE_PART, 0, BLOCKS)],
            sizes=[FINE] * BLOCKS,
        )
        assert not any(grant.slots)
        assert client.commit(grant.lease_id, [0] * BLOCKS).committed == 0
        assert client.match(client.register(SPEC), keys).hit_blocks == 0


@pytest.mark.parametrize("fidelity", ["base", "fine"])
def test_the_file_tier_keeps_what_it_is_told(tmp_path: Path, fidelity: str) -> None:
    settings = (f"file.path={tmp_path / 'kv'}", f"file.fidelity={fidelity}")
    with Daemon(*settings) as daemon:
        keys = sample_keys("file", BLOCKS)
        with Client(daemon.start().target) as client:
            Writer(client).put(keys, durable=True)
            assert client.admin.flush()
        daemon.kill()
        with Client(daemon.start().target) as client:
            fine = BLOCKS - 1 if fidelity == "fine" else 0
            assert read(client, keys) == (BLOCKS, fine)
            refined = BLOCKS if fidelity == "fine" else 1
            assert read(client, keys, refined=True) == (refined, fine)
            stats = client.admin.stats()
            assert stats["totals"]["hit_blocks"]["file"] >= 1
            (kept,) = [each for each in stats["fidelities"] if each["tier"] == "file"]
            assert (kept["blocks"], kept["refined_blocks"]) == (BLOCKS, fine)
            assert kept["fidelity"] == "ep"
            assert kept["raw_bytes"] == BLOCKS * EXACT


def test_fine_parts_make_room_before_blocks_leave() -> None:
    with (
        Daemon("dram.capacity=8MiB", "dram.extent=8MiB", "file.path=") as daemon,
        Client(daemon.start().target) as client,
    ):
        prefixes = [sample_keys(f"thin {n}", BLOCKS) for n in range(18)]
        for keys in prefixes:
            Writer(client).put(keys)
        stats = client.admin.stats()
        assert stats["dram"]["thinned_records"] > 0
        assert stats["dram"]["evicted_blocks"] == 0
        assert [client.match(client.register(SPEC), keys).hit_blocks for keys in prefixes] == [
            BLOCKS
        ] * len(prefixes)
        assert read(client, prefixes[0]) == (BLOCKS, 0)  # used least recently
        assert read(client, prefixes[-1]) == (BLOCKS, BLOCKS - 1)


def test_what_is_used_keeps_its_fine_parts() -> None:
    with (
        Daemon("dram.capacity=8MiB", "dram.extent=8MiB", "file.path=") as daemon,
        Client(daemon.start().target) as client,
    ):
        kept = sample_keys("kept", BLOCKS)
        Writer(client).put(kept)
        for n in range(16):
            Writer(client).put(sample_keys(f"other {n}", BLOCKS))
            assert read(client, kept) == (BLOCKS, BLOCKS - 1)
        assert client.admin.stats()["dram"]["thinned_records"] > 0


def test_fine_parts_keep_their_share_and_the_share_can_change() -> None:
    with (
        Daemon("dram.capacity=8MiB", "dram.extent=8MiB", "file.path=") as daemon,
        Client(daemon.start().target) as client,
    ):
        for n in range(40):
            Writer(client).put(sample_keys(f"share {n}", BLOCKS))
        slack = 2 * BLOCKS * FINE
        kept = client.admin.stats()["dram"]["fine_bytes"]
        assert abs(kept - 0.25 * (8 << 20)) <= slack
        client.admin.configure(["dram.fine_share=0"])
        for n in range(40):
            Writer(client).put(sample_keys(f"less {n}", BLOCKS))
        assert client.admin.stats()["dram"]["fine_bytes"] <= slack


def test_deleting_takes_both_parts() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("deleted", BLOCKS)
        Writer(client).put(keys)
        namespace_id = client.register(SPEC)
        assert client.admin.delete(namespace_id, keys[4:]) == BLOCKS - 4
        assert client.match(namespace_id, keys).hit_blocks == 4
        stats = client.admin.stats()
        (kept,) = [each for each in stats["fidelities"] if each["tier"] == "dram"]
        assert (kept["blocks"], kept["refined_blocks"]) == (4, 3)


def test_an_exact_namespace_never_sees_a_lossy_block() -> None:
    exact = Namespace(16, (Group("all", EXACT, varies=True),), SPEC.identity)
    assert exact.id != SPEC.id
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("exact", BLOCKS)
        Writer(client).put(keys)
        assert client.match(client.register(exact), keys).hit_blocks == 0
        assert client.acquire(client.register(exact), keys).hit_blocks == 0


@pytest.mark.parametrize("fidelity", ["base", "fine"])
def test_the_bucket_keeps_what_it_is_told(tmp_path: Path, fidelity: str) -> None:
    shared = (
        f"object.url=file://{tmp_path / 'bucket'}",
        "object.believed_s=1",
        f"object.fidelity={fidelity}",
        "file.fidelity=fine",
    )
    keys = sample_keys("bucket", BLOCKS)
    with Daemon(*shared, f"file.path={tmp_path / 'one'}") as one:
        with Client(one.start().target) as client:
            Writer(client).put(keys, durable=True)
            assert client.admin.flush()
        assert one.stop() == 0  # uploads before it ends
    with (
        Daemon(*shared, f"file.path={tmp_path / 'two'}") as two,
        Client(two.start().target) as client,
    ):
        until(lambda: read(client, keys)[0] == BLOCKS)
        fine = BLOCKS - 1 if fidelity == "fine" else 0
        assert read(client, keys)[1] == fine
        assert read(client, keys, refined=True) == ((BLOCKS, fine) if fine else (1, 0))


def test_who_insists_gets_from_the_bucket_what_this_node_has_coarse(tmp_path: Path) -> None:
    bucket = f"object.url=file://{tmp_path / 'bucket'}"
    keys = sample_keys("insists", BLOCKS)
    fine = ("object.fidelity=fine", "file.fidelity=fine", "object.believed_s=1")
    with Daemon(bucket, *fine, f"file.path={tmp_path / 'one'}") as one:
        with Client(one.start().target) as client:
            Writer(client).put(keys, durable=True)
            assert client.admin.flush()
        assert one.stop() == 0
    with (
        Daemon(bucket, "object.believed_s=1", f"file.path={tmp_path / 'two'}") as two,
        Client(two.start().target) as client,
    ):
        until(lambda: read(client, keys)[0] == BLOCKS)
        assert read(client, keys) == (BLOCKS, 0)  # object.fidelity=base: bases alone were fetched
        until(lambda: read(client, keys, refined=True) == (BLOCKS, BLOCKS - 1))


def test_a_wrong_fine_part_leaves_the_base(tmp_path: Path) -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        keys = sample_keys("corrupt", BLOCKS)
        writer = Writer(client)
        grant = writer.reserve(keys)
        wrong = [*writer.sums]
        wrong[BLOCKS + 5] ^= 1
        client.commit(grant.lease_id, wrong)
        client.admin.delete(client.register(SPEC), keys, corrupt=True)
        assert read(client, keys) == (BLOCKS, BLOCKS - 2)
