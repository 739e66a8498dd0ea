"""Room of a bucket that moves between tenants: real tiers, on folders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from kvstore.settings import ObjectSettings
from kvstore.store.lending import Lending, ObjectPart
from kvstore.tier.object import ObjectFailed
from kvstore.tier.object.connect import connect
from kvstore.tier.object.upkeep import COLLECT_AGAIN_S
from tests.tier.object.leaping import LeapingBucket
from tests.tier.object.opened import FAST, Side, run
from tests.tier.object.runs import frames, prefix_of

MIB = 1 << 20
WHOLE = 24 * MIB
SHARE = WHOLE // 2
KEPT_FREE = SHARE // 8  # ahead of each


class Tenant:
    """One tenant's tier, and a bucket whose objects a test makes older."""

    def __init__(self, name: str, path: Path, capacity: int) -> None:
        where = ObjectSettings(url=f"file://{path}/{name}", capacity_bytes=capacity, **FAST)
        self.name = name
        self.bucket = LeapingBucket(connect(where))
        self.side = Side(where, self.bucket)
        self.part = ObjectPart(self.side.tier, 0, WHOLE, 1.0, SHARE)
        self._written = 0

    @property
    def nbytes(self) -> int:
        return self.side.tier.writes.physical_nbytes

    @property
    def collected(self) -> float:
        return float(sum((self.side.counted("object_collected") or {}).values()))

    async def put(self) -> bool:
        """Upload one more object; False if there is no room."""
        try:
            keys = prefix_of(f"{self.name} {self._written}", 16)
            await self.side.write(frames(keys))
        except ObjectFailed as error:
            if error.reason != "full":
                raise
            return False
        self._written += 1
        return True

    async def collect(self) -> None:
        """Count and collect, when nothing is too young."""
        self.bucket.leap(FAST["grace_s"] + 1.0)
        await self.side.tier.collect()


class Bucket:
    """What two tenants share."""

    def __init__(self, one: Tenant, other: Tenant) -> None:
        self.tenants = one, other
        self.lending = Lending(WHOLE)
        for each in self.tenants:
            self.lending.add(each.name, each.part)
            each.side.tier.share_room(partial(self.lending.counted, each.name), self.lending.look)

    def look(self) -> None:
        """Look as often as it takes until nothing moves."""
        for _ in range(10):
            self.lending.look()
        assert sum(each.nbytes for each in self.tenants) <= WHOLE

    async def fill(self, tenant: Tenant, most: int = WHOLE) -> None:
        """Let a tenant upload until it finds no room, or has so much."""
        self.look()
        while tenant.nbytes < most and await tenant.put():
            self.look()


@asynccontextmanager
async def shared(path: Path, capacity: int = SHARE, *, ready: bool = True) -> AsyncIterator[Bucket]:
    """Open a bucket of two tenants. capacity: each begins with that. ready: both are counted."""
    bucket = Bucket(Tenant("one", path, capacity), Tenant("other", path, capacity))
    async with AsyncExitStack() as stack:
        for each in bucket.tenants:
            if ready:
                each.side.tier.start()
                await each.side.tier.ready(each.side.deadline())
            stack.push_async_callback(each.side.tier.close)
        yield bucket


def test_what_one_leaves_the_other_may_have_but_for_what_is_kept_free(tmp_path: Path) -> None:
    async def test() -> None:
        async with shared(tmp_path) as bucket:
            busy, idle = bucket.tenants
            await bucket.fill(busy)
            assert WHOLE - KEPT_FREE - 2 * MIB < busy.nbytes < WHOLE - KEPT_FREE // 2
            assert await idle.put(), "there is room ahead of it"

    run(test)


def test_who_is_within_its_share_gets_it_back_and_loses_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with shared(tmp_path) as bucket:
            borrows, wakes = bucket.tenants
            await bucket.fill(borrows)
            for _ in range(12):
                await bucket.fill(wakes, SHARE - MIB)
                await wakes.collect()  # it has found no room
                bucket.look()
                await borrows.collect()
                bucket.look()
            assert wakes.nbytes >= SHARE - MIB
            assert wakes.collected == 0, "it never was over its share"
            assert borrows.collected > 0
            await bucket.fill(borrows)
            assert SHARE * 0.8 <= borrows.nbytes <= SHARE + MIB
            for _ in range(3):
                await borrows.collect()
                await bucket.fill(borrows)
                await wakes.collect()
            assert wakes.collected == 0

    run(test)


def test_what_is_guaranteed_comes_back_whatever_others_weigh(tmp_path: Path) -> None:
    async def test() -> None:
        async with shared(tmp_path) as bucket:
            heavy, owner = bucket.tenants
            heavy.part.weight, owner.part.guaranteed = 100.0, 16 * MIB
            await bucket.fill(heavy)
            for _ in range(20):
                await bucket.fill(owner, 15 * MIB)
                await heavy.collect()
            assert owner.nbytes >= 15 * MIB
            await bucket.fill(heavy)
            await owner.collect()
            assert owner.collected == 0

    run(test)


def test_what_others_must_give_back_first_is_not_taken_from_the_owner(tmp_path: Path) -> None:
    """Its cap is still low, and it is refused: it waits, and collects none of its own."""

    async def test() -> None:
        async with shared(tmp_path) as bucket:
            borrows, wakes = bucket.tenants
            await bucket.fill(borrows)
            await bucket.fill(wakes)
            assert wakes.nbytes < SHARE // 2
            assert not await wakes.put()
            had = wakes.nbytes
            await wakes.collect()
            assert (wakes.collected, wakes.nbytes) == (0, had)

    run(test)


@pytest.mark.parametrize("first", [0, 1])
def test_after_a_restart_nobody_loses_what_it_had_borrowed(tmp_path: Path, first: int) -> None:
    async def test() -> None:
        async with shared(tmp_path) as bucket:
            await bucket.fill(bucket.tenants[1], MIB)
            await bucket.fill(bucket.tenants[0])
            had = [each.nbytes for each in bucket.tenants]
        async with shared(tmp_path, ready=False) as bucket:
            order = [bucket.tenants[first], bucket.tenants[1 - first]]
            bucket.look()
            assert [each.part.cap for each in bucket.tenants] == [SHARE, SHARE], "not counted yet"
            for each in order:
                await each.collect()
                counted = [each for each in bucket.tenants if each.side.tier.is_counted]
                assert all(each.part.cap + MIB > each.nbytes for each in counted), (
                    "it has not grown"
                )
                bucket.look()
            assert [each.collected for each in bucket.tenants] == [0, 0]
            clock = 64  # bytes of an object that a count may add
            assert [each.nbytes for each in bucket.tenants] == pytest.approx(had, abs=clock)
            assert sum(each.part.cap for each in bucket.tenants) <= WHOLE

    run(test)


def test_nobody_may_have_what_another_may_hold_that_is_not_counted_yet(tmp_path: Path) -> None:
    async def test() -> None:
        async with shared(tmp_path, ready=False) as bucket:
            counted, unknown = bucket.tenants
            await counted.collect()
            await bucket.fill(counted)
            assert counted.nbytes > SHARE - 2 * MIB
            assert (counted.part.cap, unknown.part.cap) == (SHARE, SHARE)
            await unknown.collect()
            await bucket.fill(counted)
            assert counted.nbytes > SHARE

    run(test)


def test_who_finds_no_room_gets_what_is_free_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with shared(tmp_path) as bucket:
            busy = bucket.tenants[0]
            while await busy.put():
                pass
            assert busy.nbytes > WHOLE - KEPT_FREE - 2 * MIB

    run(test)


def test_what_is_over_a_lowered_cap_is_collected_soon(tmp_path: Path) -> None:
    async def test() -> None:
        async with shared(tmp_path) as bucket:
            tenant = bucket.tenants[0]
            await bucket.fill(tenant, 4 * MIB)
            tenant.side.tier.share_room(lambda: None, lambda: None)
            tenant.side.tier.keep(0)
            tenant.bucket.leap(FAST["grace_s"] + 1.0)
            tenant.side.clock.ahead_s += COLLECT_AGAIN_S
            tenant.side.tier.set_capacity(2 * MIB)
            while tenant.nbytes > 2 * MIB:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert tenant.nbytes > MIB

    run(test)
