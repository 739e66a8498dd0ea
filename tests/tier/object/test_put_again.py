"""What was deleted and is put again: every daemon finds it, whoever stored its object before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.tier.object import tombstones
from tests.tier.file.frames import SEALING
from tests.tier.object import opened as opened_here
from tests.tier.object.opened import RUN_BLOCKS, Side, opened, run
from tests.tier.object.runs import frames, prefix_of

KEYS = prefix_of("again", RUN_BLOCKS)
RECORDS = 2 * RUN_BLOCKS


@pytest.fixture(params=["in clear", "encrypted"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setattr(opened_here, "sealing", SEALING if request.param == "encrypted" else None)
    monkeypatch.setattr(tombstones, "SKEW_S", 0.0)  # a folder has fine times
    return {"url": f"file://{tmp_path}/bucket"}


async def found(side: Side) -> int:
    """Return how many records are found and read as they were put."""
    return await side.read_all(await side.find(KEYS))


async def look_again(side: Side) -> None:
    """Let a daemon ask the bucket for everything that it believes."""
    side.clock.ahead_s += 120.0
    await side.tier.collect()


def test_an_object_that_the_deleter_did_not_know_is_stored_again(where: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened(where) as one, opened(where) as two:
            await one.write(frames(KEYS))
            assert await found(one) == RECORDS
            await two.delete(KEYS)
            await asyncio.sleep(0.05)
            await two.write(frames(KEYS))
            assert await found(two) == RECORDS
            await look_again(one)
            assert await found(one) == RECORDS, "its footer has the key of the first object"
            assert "corrupt_blocks" not in one.metrics.totals() or not one.counted("corrupt_blocks")
            async with opened(where) as three:
                assert await found(three) == RECORDS

    run(test)


def test_what_was_found_wrong_is_not_found_again_until_it_is_stored_anew(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        async with opened(where) as one, opened(where) as two:
            written = await one.write(frames(KEYS))
            path = tmp_path / "bucket" / str(written.name)
            data = bytearray(path.read_bytes())
            data[5000] ^= 1  # in the first record
            path.write_bytes(data)
            frame = (await two.find(KEYS)).frames[0]
            two.tier.reads.spoil(frame.location, [(frame.header.part, KEYS[0])])
            asked = two.counted("object_requests")["get"]
            for _ in range(2):
                assert await records(two) == RECORDS - 1
            assert two.counted("object_requests")["get"] == asked
            await two.write(frames(KEYS))
            for side in (one, two):
                await look_again(side)
                assert await found(side) == RECORDS
            async with opened(where) as three:
                assert await found(three) == RECORDS

    run(test)


def test_what_another_daemon_stores_anew_is_found_by_who_had_found_it_wrong(
    where: dict[str, Any],
) -> None:
    async def test() -> None:
        async with opened(where) as one, opened(where) as two:
            await one.write(frames(KEYS))
            for side in (one, two):
                frame = (await side.find(KEYS)).frames[0]
                side.tier.reads.spoil(frame.location, [(frame.header.part, KEYS[0])])
                assert await records(side) == RECORDS - 1
            await one.write(frames(KEYS))
            await look_again(two)
            assert await found(two) == RECORDS

    run(test)


async def records(side: Side) -> int:
    """Return how many records are found."""
    return sum(len(frame.live) for frame in (await side.find(KEYS)).frames)


def test_what_another_daemon_deleted_does_not_count_as_stored(where: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened(where) as one, opened(where) as two:
            await one.write(frames(KEYS))
            await two.delete(KEYS[-1:])
            await one.tier._upkeep.inform()
            await asyncio.sleep(0.05)
            await one.write(frames(KEYS))
            assert await found(one) == RECORDS
            async with opened(where) as three:
                assert await found(three) == RECORDS

    run(test)


def test_of_writers_that_store_it_again_at_once_all_read_what_is_there(
    where: dict[str, Any],
) -> None:
    async def test() -> None:
        async with opened(where) as one, opened(where) as two, opened(where) as three:
            await three.write(frames(KEYS))
            await one.delete(KEYS)
            await two.tier._upkeep.inform()
            await asyncio.sleep(0.05)
            await asyncio.gather(*(side.write(frames(KEYS)) for side in (one, two)))
            for side in (one, two):
                await look_again(side)
                assert await found(side) == RECORDS

    run(test)
