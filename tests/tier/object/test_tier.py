"""What the tier promises, on real stores of each kind and on a folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.block import NamespaceId, Part
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.settings import ObjectSettings
from kvstore.testing.seaweed import Seaweed
from kvstore.tier.object import ObjectFailed, ObjectRead, Outcome
from kvstore.tier.object.connect import connect
from kvstore.tier.object.names import CLOCK, TOMBSTONES
from kvstore.tier.object.tombstones import SKEW_S
from tests.tier.file.frames import SEALING
from tests.tier.object import opened as opened_here
from tests.tier.object.azurite import Azurite
from tests.tier.object.google import Google
from tests.tier.object.leaping import LeapingBucket
from tests.tier.object.opened import FAST, RUN_BLOCKS, Side, opened, run
from tests.tier.object.runs import (
    NAMESPACE,
    PARTS,
    frames,
    prefix_of,
    reads_of,
    records_found,
)

STORES = {"s3": "seaweed", "gcs": "google_server", "azure": "azure_server"}


@pytest.fixture(params=["folder", "sealed folder", "sealed s3", *STORES])
def where(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    own_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    kind = request.param.removeprefix("sealed ")
    monkeypatch.setattr(opened_here, "sealing", SEALING if kind != request.param else None)
    if kind == "folder":
        return {"url": f"file://{tmp_path}/bucket"}
    server: Seaweed | Google | Azurite = request.getfixturevalue(STORES[kind])
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.settings(own_prefix)


def leaping(where: dict[str, Any]) -> LeapingBucket:
    return LeapingBucket(connect(ObjectSettings(**where)))


async def names(side: Side) -> list[str]:
    """Return what is in the bucket, but for keys."""
    found = [item.name async for page in side.bucket.pages("") for item in page]
    return sorted(name for name in found if "/keys/" not in name)


def test_what_one_daemon_writes_another_finds_and_reads(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("shared", 40)
        async with opened(where) as writer, opened(where) as reader:
            for first in (0, 16, 32):
                await writer.write(frames(keys, first, min(first + 16, 40)))
            found = await reader.find(keys)
            assert (found.blocks, found.complete) == (40, True)
            assert len(records_found(found)) == 80
            assert await reader.read_all(found) == 80
            assert [frame.header.first_block for frame in found.frames] == [0, 0, 16, 16, 32, 32]

    run(test)


def test_a_prefix_that_diverges_or_ends_inside_a_run_is_found_as_far_as_it_goes(
    where: dict[str, Any],
) -> None:
    async def test() -> None:
        one = prefix_of("one", 32)
        other = prefix_of("other", 32, like=one[:20])
        async with opened(where) as writer, opened(where) as reader:
            await writer.write(frames(one, 0, 16))
            await writer.write(frames(one, 16, 32))
            await writer.write(frames(other, 20, 32))
            assert (await reader.find(one[:10])).blocks == 10
            assert (await reader.find(prefix_of("third", 40, like=one[:23]))).blocks == 23
            found = await reader.find(other)
            assert found.blocks == 32
            assert await reader.read_all(found) == 64

    run(test)


def test_parts_from_several_daemons_complete_each_other(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("sharded", 16)
        async with opened(where) as first, opened(where) as second:
            await first.write(frames(keys, parts=PARTS[:1]))
            await second.write(frames(keys, parts=PARTS[1:]))
        async with opened(where) as reader:
            assert len(records_found(await reader.find(keys))) == 32

    run(test)


def test_writers_of_the_same_bytes_at_once_leave_one_object(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("raced", 16)
        async with opened(where) as one, opened(where) as two:
            runs = await asyncio.gather(*(side.write(frames(keys)) for side in (one, two, one)))
            assert len(set(runs)) == 1
            before = one.counted("object_requests")["put"]
            await one.write(frames(keys))  # known to be there: nothing is sent
            assert one.counted("object_requests")["put"] == before
            found = [name for name in await names(one) if name.count("-") == 1]
            assert found == [str(runs[0].name)]
            assert await two.read_all(await two.find(keys)) == 32

    run(test)


@pytest.mark.parametrize("parts", [False, True])
def test_large_objects_go_up_whole_or_in_parts_and_come_down(
    where: dict[str, Any], parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts:
        monkeypatch.setattr("kvstore.tier.object.bucket.WHOLE_NBYTES_MAX", 16 << 20)

    async def test() -> None:
        keys = prefix_of("large", 4)
        nbytes = 9 << 20  # more than one request carries
        stored = frames(keys, parts=[Part(0, 0)], nbytes=nbytes)
        async with opened({**where, "grace_s": 60.0}) as side:
            await side.write(stored)
            reads, targets = reads_of(await side.find(keys))
            seen: dict[int, bytes] = {}

            def see(index: int) -> None:
                assert index not in seen
                seen[index] = bytes(targets[index][2])

            told = [replace(read, then=partial(see, i)) for i, read in enumerate(reads)]
            assert set(await side.tier.reads.read(told, side.deadline())) == {Outcome.READ}
            expected = [bytes(buffer) for buffer in stored[0][1]]
            assert [bytes(target) for _, _, target in targets] == expected
            assert [seen[index] for index in range(4)] == expected
            assert side.counted("tier_bytes")["object/read"] >= 4 * nbytes

    run(test)


def test_what_was_never_stored_costs_one_request_once(where: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened(where) as side:
            prefixes = [prefix_of(f"absent {i}", 40) for i in range(50)]
            before = side.requests
            for _ in range(2):
                answers = [await side.find(keys) for keys in prefixes]
                assert {(found.blocks, found.complete) for found in answers} == {(0, True)}
                assert side.requests - before == 50
            for asked in (51, 52):
                side.clock.ahead_s += 5.0  # that there is nothing is believed for a while only
                for _ in range(10):
                    await side.find(prefixes[0])
                assert side.requests - before == asked

    run(test)


def test_what_another_daemon_has_stored_since_is_seen_soon(where: dict[str, Any]) -> None:
    """A prefix that was absent, and one whose last run has grown."""

    async def test() -> None:
        new, grown = prefix_of("new", 20), prefix_of("grown", 40)
        async with opened(where) as writer, opened(where) as reader:
            await writer.write(frames(grown, 0, 16))
            await writer.write(frames(grown, 16, 20))
            assert [(await reader.find(keys)).blocks for keys in (new, grown)] == [0, 20]
            await writer.write(frames(new, 0, 16))
            await writer.write(frames(grown, 16, 32))
            before = reader.requests
            assert [(await reader.find(keys)).blocks for keys in (new, grown)] == [0, 20]
            assert reader.requests == before, "not asked again so soon"
            reader.clock.ahead_s += 5.0
            assert [(await reader.find(keys)).blocks for keys in (new, grown)] == [16, 32]
            reader.clock.ahead_s += 5.0
            before = reader.requests
            whole = (new[:16], grown[:32])
            assert [(await reader.find(keys)).blocks for keys in whole] == [16, 32]
            assert reader.requests == before, "what is there is believed for longer"

    run(test)


def test_lookups_at_once_share_their_requests(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("asked", 16)
        async with opened(where) as writer, opened(where) as reader:
            await writer.write(frames(keys))
            before = reader.requests
            answers = await asyncio.gather(*(reader.find(keys) for _ in range(20)))
            assert {found.blocks for found in answers} == {16}
            assert reader.requests - before == 2

    run(test)


def test_what_was_absent_is_found_as_soon_as_this_daemon_has_written_it(
    where: dict[str, Any],
) -> None:
    async def test() -> None:
        keys = prefix_of("late", 16)
        async with opened(where) as side:
            assert (await side.find(keys)).blocks == 0
            await side.write(frames(keys))
            before = side.requests
            assert (await side.find(keys)).blocks == 16
            assert side.requests == before

    run(test)


def test_an_object_that_was_collected_is_a_miss_and_is_forgotten(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("gone", 16)
        async with opened(where) as side:
            written = await side.write(frames(keys))
            found = await side.find(keys)
            await side.bucket.delete([str(written.name)])
            reads, _ = reads_of(found)
            assert set(await side.tier.reads.read(reads, side.deadline())) == {Outcome.GONE}
            assert (await side.find(keys)).blocks == 0

    run(test)


def test_a_listed_object_that_is_none_of_ours_is_passed_over(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("forged", 16)
        async with opened(where) as writer, opened(where) as reader:
            good = await writer.write(frames(keys))
            for forged in (b"x", b"x" * 4096, b"x" * 50_000):
                name = str(replace(good.name, nonce=len(forged)))
                await writer.bucket.put(name, [forged], len(forged))
            assert await reader.read_all(await reader.find(keys)) == 32
            assert reader.counted("corrupt_blocks") == {"object": 3}

    run(test)


# ---- deletes ---------------------------------------------------------------------------------


def test_a_deleted_block_does_not_come_back_for_anybody(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("deleted", 32)
        async with opened(where) as one, opened(where) as two:
            for first in (0, 16):
                await one.write(frames(keys, first, first + 16))
            stale = await two.find(keys)
            assert stale.blocks == 32
            copy = await one.write(frames(keys, 16, 24))  # the block is in two objects
            await one.delete([keys[20]])
            await two.tier.collect()
            async with opened(where) as three:  # knows nothing yet
                for side in (one, two, three):
                    found = records_found(await side.find(keys))
                    assert keys[20] not in {key for _, key in found}
            assert str(copy.name) not in await names(one)

    run(test)


def test_what_is_stored_after_a_delete_lives(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("again", 16)
        bucket = leaping(where)
        async with opened(where, bucket=bucket) as side, opened(where, bucket=bucket) as other:
            await side.write(frames(keys))
            await side.delete(keys)
            assert (await side.find(keys)).frames == ()
            bucket.leap(SKEW_S + 1.0)
            await side.write(frames(keys))
            await other.tier.collect()
            for each in (side, other):
                assert len(records_found(await each.find(keys))) == 32

    run(test)


def test_a_cleared_namespace_is_empty_and_others_are_not(where: dict[str, Any]) -> None:
    async def test() -> None:
        mine, theirs = prefix_of("mine", 16), prefix_of("theirs", 16)
        other = NamespaceId(b"o" * 32)
        async with opened(where) as side:
            await side.write(frames(mine))
            await side.write(frames(theirs, namespace_id=other))
            await side.delete(None)
            assert (await side.find(mine)).frames == ()
            assert (await side.find(theirs, other)).blocks == 16

    run(test)


def test_a_delete_waits_for_what_is_on_its_way_up(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("racing", 16)
        async with opened(where) as side:
            writing = asyncio.create_task(side.write(frames(keys)))
            await asyncio.sleep(0)
            await side.delete(keys)
            assert writing.done()
            async with opened(where) as other:
                assert (await other.find(keys)).frames == ()

    run(test)


def test_an_unreadable_tombstone_kills_its_whole_namespace(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("doubt", 16)
        async with opened(where) as side:
            await side.write(frames(keys))
            await side.bucket.put(f"{TOMBSTONES}/{NAMESPACE.hex()}/{5:016x}", [b"rot"], 3)
        async with opened(where) as other:
            # In an encrypted bucket it is no tombstone at all: see test_sealed.
            found = await other.find(keys)
            assert bool(found.frames) == (opened_here.sealing is not None)

    run(test)


# ---- caps ------------------------------------------------------------------------------------


def test_the_cap_refuses_writes_and_collects_the_oldest(where: dict[str, Any]) -> None:
    async def test() -> None:
        small = {**where, "capacity_bytes": 3 << 20, "grace_s": 1.0}
        bucket = leaping(small)
        async with opened(small, bucket=bucket) as side:
            written = [prefix_of(f"full {i}", 16) for i in range(4)]
            for keys in written:
                bucket.leap(1.0)  # a store's times are as coarse as that
                await side.write(frames(keys))
            with pytest.raises(ObjectFailed, match="cap"):
                await side.write(frames(prefix_of("one more", 16)))
            assert side.tier.writes.physical_nbytes <= 3 << 20
            assert side.counted("object_refused_writes") == {"full": 1}
            bucket.leap(2.0)  # past the grace period
            await side.tier.collect()
            assert side.counted("object_collected")["capacity"] >= 1
            assert (await side.find(written[0])).blocks == 0
            assert (await side.find(written[-1])).blocks == 16
            await side.write(frames(prefix_of("fits again", 16)))
            assert side.tier.writes.physical_nbytes <= 3 << 20

    run(test)


def test_nobody_deletes_what_is_young_and_everybody_what_is_too_old(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("aged", 16)
        bucket = leaping(where)
        tight = {**where, "capacity_bytes": 1 << 20, "grace_s": 60.0}
        old = {**where, "max_age_s": 0.5}
        async with opened(where, bucket=bucket) as writer:
            await writer.write(frames(keys))
            await writer.write(frames(prefix_of("aged, too", 32), 0, 32))
            async with opened(tight, bucket=bucket) as careful:
                await careful.tier.collect()
                assert (await careful.find(keys)).blocks == 16
            bucket.leap(FAST["grace_s"] + 5.0)
            async with opened(old, bucket=bucket) as one, opened(old, bucket=bucket) as two:
                await asyncio.gather(one.tier.collect(), two.tier.collect())
                assert (await one.find(keys)).blocks == 0
                assert [n for n in await names(one) if not n.endswith(CLOCK)] == []

    run(test)


def test_a_collection_deletes_objects_with_deleted_blocks_and_then_the_tombstone(
    where: dict[str, Any],
) -> None:
    async def test() -> None:
        keys, kept = prefix_of("buried", 16), prefix_of("kept", 16)
        bucket = leaping(where)
        async with opened(where, bucket=bucket) as writer:
            await writer.write(frames(keys))
            await writer.write(frames(kept))
        async with opened(where, bucket=bucket) as side:
            await side.delete([keys[3]])  # knows of no object with it
            assert len(await names(side)) == 4
            bucket.leap(FAST["grace_s"] + 1.0)
            await side.tier.collect()
            left = await names(side)
            assert [name for name in left if name.startswith(TOMBSTONES)] == []
            assert len(left) == 2
            assert (await side.find(kept)).blocks == 16
            assert (await side.find(keys)).blocks == 0

    run(test)


def test_before_it_has_asked_nothing_is_found_or_written(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("early", 16)
        async with opened(where) as writer:
            await writer.write(frames(keys))
        async with opened(where, ready=False) as side:
            found = await side.find(keys)
            assert (found.blocks, found.complete) == (0, False)
            with pytest.raises(Unavailable, match="not counted"):
                await side.write(frames(keys))

    run(test)


def test_impossible_frames_and_reads_are_refused(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("odd", RUN_BLOCKS)
        async with opened(where) as side:
            (header, payload), *_ = frames(keys)
            with pytest.raises(InvalidRequest, match="another size"):
                await side.write([(header, payload[:-1])])
            written = await side.write([(header, payload)])
            extent = written.extent(written.frames[0])
            with pytest.raises(InvalidRequest):
                await side.tier.reads.read(
                    [ObjectRead(extent, extent.nbytes - 8, [memoryview(bytearray(16))])],
                    side.deadline(),
                )

    run(test)
