"""An encrypted bucket after a rotation of its keys, by daemons that have not heard of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.block import BlockKey
from kvstore.tier.object import ObjectFailed
from tests.tier.file.frames import SEALING
from tests.tier.object import opened as opened_here
from tests.tier.object.opened import Side, opened, run
from tests.tier.object.runs import frames, prefix_of
from tests.tier.object.test_sealed import found, objects

GRACE_S = 0.5


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(opened_here, "sealing", SEALING)
    return {"url": f"file://{tmp_path}/bucket", "grace_s": GRACE_S}


async def rotated(side: Side, keys: Sequence[BlockKey]) -> None:
    """Store a prefix under a new epoch."""
    await side.tier.keys.rotate(side.deadline())
    await side.write(frames(keys))


def test_others_read_the_new_keys_when_they_meet_an_object_of_them(where: dict[str, Any]) -> None:
    async def test() -> None:
        old, new = prefix_of("old", 16), prefix_of("new", 16)
        async with opened(where) as one, opened(where) as two:
            await one.write(frames(old))
            await rotated(one, new)
            assert await found(two, old) == await found(two, new) == 32
            assert not two.counted("corrupt_blocks")

    run(test)


def test_a_collection_without_the_new_keys_brings_no_deleted_block_back(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        keys = prefix_of("deleted", 16)
        async with opened(where) as new, opened(where) as old:
            await rotated(new, keys)
            await old.delete(keys)  # of an object that it has not seen
            await asyncio.sleep(2 * GRACE_S)
            await old.tier.collect()
            assert objects(tmp_path) == []
            async with opened(where) as third:
                assert await found(third, keys) == 0
            await new.tier.collect()
            new.clock.ahead_s += 120.0
            assert await found(new, keys) == 0

    run(test)


def test_a_tombstone_of_a_new_epoch_kills_at_once(where: dict[str, Any]) -> None:
    async def test() -> None:
        keys = prefix_of("killed", 16)
        async with opened(where) as new, opened(where) as old:
            await new.write(frames(keys))
            assert await found(old, keys) == 32
            await new.tier.keys.rotate(new.deadline())
            await new.delete(keys)
            await old.tier._upkeep.inform()
            assert await found(old, keys) == 0

    run(test)


def test_an_object_whose_new_keys_cannot_be_read_is_neither_corrupt_nor_replaced(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        keys = prefix_of("unread", 16)
        async with opened(where) as new, opened(where) as old:
            await rotated(new, keys)
            (path,) = objects(tmp_path)
            data = path.read_bytes()

            async def fails(*_: object) -> None:
                raise ObjectFailed("the store is away", reason="connection")

            with monkeypatch.context() as patch:
                patch.setattr(old.tier.keys, "_listed", fails)
                with pytest.raises(ObjectFailed, match="is away"):
                    await old.write(frames(keys))
                assert await found(old, keys) == 0
                with pytest.raises(ObjectFailed, match="is away"):
                    await old.tier.collect()
            assert path.read_bytes() == data
            assert await found(old, keys) == await found(new, keys) == 32
            await old.write(frames(keys))
            assert path.read_bytes() == data
            assert not old.counted("corrupt_blocks")

    run(test)


def test_keys_are_read_once_for_many_objects_at_once(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        prefixes = [prefix_of(f"many {at}", 16) for at in range(8)]
        async with opened(where) as new, opened(where) as old:
            await new.tier.keys.rotate(new.deadline())
            for keys in prefixes:
                await new.write(frames(keys))
            listed, reads = old.tier.keys._listed, 0

            async def counted(deadline: float) -> Any:
                nonlocal reads
                reads += 1
                await asyncio.sleep(0.1)
                return await listed(deadline)

            monkeypatch.setattr(old.tier.keys, "_listed", counted)
            assert await asyncio.gather(*(found(old, keys) for keys in prefixes)) == [32] * 8
            assert reads <= 2

    run(test)
