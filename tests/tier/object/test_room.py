"""Room for new objects while others are on their way: on a folder whose puts are held back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.settings import ObjectSettings
from kvstore.tier.object import ObjectFailed
from kvstore.tier.object.connect import connect
from kvstore.tier.object.names import Names
from kvstore.tier.object.upkeep import COLLECT_AGAIN_S
from tests.tier.object.gate import GatedBucket
from tests.tier.object.leaping import LeapingBucket
from tests.tier.object.opened import FAST, Side, opened, run
from tests.tier.object.runs import frames, prefix_of

ROOM = 3 << 20  # for four objects


class Site(NamedTuple):
    """A tier with three objects, and a fourth on its way, held back."""

    side: Side
    bucket: LeapingBucket
    gate: GatedBucket
    coming: asyncio.Task[object]

    def age(self) -> None:
        """Make everything old enough to be deleted."""
        self.bucket.leap(FAST["grace_s"] + 1.0)

    async def arrive(self) -> None:
        self.gate.opened.set()
        await self.coming

    @property
    def collected(self) -> float:
        return float((self.side.counted("object_collected")).get("capacity", 0.0))


@asynccontextmanager
async def site(path: Path) -> AsyncIterator[Site]:
    where = {"url": f"file://{path}/bucket", "capacity_bytes": ROOM}
    bucket = LeapingBucket(connect(ObjectSettings(**where)))
    gate = GatedBucket(bucket)
    async with opened(where, bucket=gate) as side:
        for number in range(3):
            bucket.leap(1.0)
            await side.write(frames(prefix_of(f"there {number}", 16)))
        gate.holds = lambda kind, name: kind == "put" and Names().parse_run(name) is not None
        coming = asyncio.create_task(side.write(frames(prefix_of("coming", 16))))
        await gate.arrived.wait()
        yield Site(side, bucket, gate, coming)


def test_what_was_let_in_before_takes_no_room_from_what_was_refused(tmp_path: Path) -> None:
    """Else a full bucket makes room only at a second refusal, half a minute later."""

    async def test() -> None:
        async with site(tmp_path) as there:
            refused = frames(prefix_of("refused", 16))
            with pytest.raises(ObjectFailed, match="cap"):
                await there.side.write(refused)
            await there.arrive()
            there.age()
            await there.side.tier.collect()
            assert there.collected >= 1
            await there.side.write(refused)

    run(test)


def test_nothing_leaves_for_what_was_refused_once_as_much_was_let_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with site(tmp_path) as there:
            refused = frames(prefix_of("refused", 16))
            with pytest.raises(ObjectFailed, match="cap"):
                await there.side.write(refused)
            await there.arrive()
            there.side.tier.set_capacity(ROOM * 5 // 4)
            await there.side.write(refused)
            there.age()
            await there.side.tier.collect()
            assert there.collected == 0

    run(test)


def test_what_arrives_after_the_cap_was_lowered_is_collected_soon(tmp_path: Path) -> None:
    async def test() -> None:
        async with site(tmp_path) as there:
            cap = there.side.tier.writes.physical_nbytes * 7 // 8  # enough for what is there
            there.side.tier.set_capacity(cap)
            there.age()
            there.side.clock.ahead_s += COLLECT_AGAIN_S
            await there.arrive()
            async with asyncio.timeout(10):
                while there.side.tier.writes.physical_nbytes > cap:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert there.collected >= 1

    run(test)


def test_a_bucket_over_its_cap_with_nothing_old_enough_is_listed_less_and_less(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with site(tmp_path) as there:
            await there.arrive()
            there.side.tier.set_capacity(1 << 20)
            upkeep, pauses = there.side.tier._upkeep, list[float]()
            for _ in range(4):
                upkeep._collect_at = upkeep._now()
                await upkeep._collect_if_due()
                pauses.append(upkeep._collect_at - upkeep._now())
            assert there.collected == 0
            assert pauses[-1] > 2 * pauses[0] >= COLLECT_AGAIN_S

    run(test)
