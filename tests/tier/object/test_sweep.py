"""Collections of a bucket that has more objects than one count looks at for deleted blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.tier.object import ObjectFailed, collection
from tests.tier.object.opened import Side, opened, run
from tests.tier.object.runs import frames, prefix_of

GRACE_S = 0.5
OBJECTS = 5


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(collection, "SUSPECTS_MAX", 2)
    return {"url": f"file://{tmp_path}/bucket", "grace_s": GRACE_S}


def counted(tmp_path: Path) -> tuple[int, int]:
    """Return how many objects and tombstones there are."""
    paths = [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    tombstones = sum("tombstones" in str(path) for path in paths)
    return sum(path.name.count("-") == 1 for path in paths) - tombstones, tombstones


async def store(side: Side) -> None:
    for at in range(OBJECTS):
        await side.write(frames(prefix_of(f"object {at}", 16)))


@pytest.mark.parametrize("deleted", range(OBJECTS))
def test_every_object_is_looked_at_in_the_end(
    where: dict[str, Any], tmp_path: Path, deleted: int
) -> None:
    async def test() -> None:
        async with opened(where) as one:
            await store(one)
            async with opened(where) as two:
                await two.delete(prefix_of(f"object {deleted}", 16))
                await asyncio.sleep(2 * GRACE_S)
                left = []
                for _ in range(3):
                    await two.tier.collect()
                    left.append(counted(tmp_path))
                assert left[-1] == (OBJECTS - 1, 0)
                assert [tombstones for _, tombstones in left] == [1, 1, 0]

    run(test)


def test_what_is_deleted_during_a_sweep_waits_for_the_next(
    where: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        async with opened(where) as one:
            await store(one)
            names = sorted(name.first for name in one.tier._catalog._footers)
            first = next(
                keys
                for keys in (prefix_of(f"object {at}", 16) for at in range(OBJECTS))
                if keys[0] == names[0]
            )
            async with opened(where) as two:
                await two.delete([prefix_of("object 0", 16)[-1]])
                await asyncio.sleep(2 * GRACE_S)
                await two.tier.collect()
                await two.delete(first)  # of an object that the sweep is past
                await asyncio.sleep(2 * GRACE_S)
                for _ in range(6):
                    await two.tier.collect()
                    async with opened(where) as third:
                        assert await third.read_all(await third.find(first)) == 0
                assert counted(tmp_path)[1] == 0

    run(test)


def test_a_sweep_goes_on_where_an_object_could_not_be_read(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with opened(where) as one:
            await store(one)
        async with opened(where) as two:
            await two.delete([prefix_of("object 0", 16)[0]])
            await asyncio.sleep(2 * GRACE_S)
            await two.tier.collect()

            async def fails(*_: object) -> None:
                raise ObjectFailed("not now", reason="timeout")

            with monkeypatch.context() as patch:
                patch.setattr(two.tier._requests, "fetch", fails)
                await two.tier.collect()
            assert counted(tmp_path)[1] == 1
            for _ in range(2):
                await two.tier.collect()
            assert counted(tmp_path) == (OBJECTS - 1, 0)

    run(test)


def test_a_sweep_that_is_not_over_goes_on_soon(where: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened(where) as one:
            await store(one)
        async with opened({**where, "collect_every_s": 3600.0}) as two:
            await two.delete([prefix_of("object 0", 16)[0]])
            upkeep = two.tier._upkeep
            pauses = []
            for _ in range(3):
                two.clock.ahead_s += 2 * 3600.0
                await upkeep._collect_if_due()
                pauses.append(upkeep._collect_at - two.clock())
            assert max(pauses[:2]) <= 450.0
            assert pauses[2] >= 1799.0

    run(test)
