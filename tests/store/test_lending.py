"""What tenants share: room that moves between them, and the care for their stores."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.daemon import wire_store
from kvstore.metrics import Metrics
from kvstore.model.block import Slot
from kvstore.settings import load_settings, overridden
from kvstore.store import tenants as tenants_module
from kvstore.store.lending import LOOK_S, ROOM_POLL_S, DramPart, Lending
from kvstore.store.tenants import Tenants
from kvstore.tier.file import DiskFailed

MIB = 1 << 20


@dataclass
class Room:
    """A part that gives back at once what its cap does not allow. Sizes in MiB."""

    guaranteed: int
    used: int
    cap: int
    most: int = 100 * MIB
    weight: float = 1.0
    least: int = MIB

    @property
    def held(self) -> int:
        return self.used

    def set_cap(self, nbytes: int) -> None:
        self.cap = nbytes
        self.used = min(self.used, nbytes)


def test_room_of_one_that_is_being_closed_is_not_lent() -> None:
    lending = Lending(100 * MIB)
    stays, leaves = Room(10 * MIB, 40 * MIB, 40 * MIB), Room(10 * MIB, 60 * MIB, 60 * MIB)
    lending.add("stays", stays)
    lending.add("leaves", leaves)
    lending.leave("leaves")
    for _ in range(10):
        stays.used = stays.cap
        lending.look()
    assert stays.cap == 40 * MIB
    assert lending.overshoot_nbytes == 0
    lending.remove("leaves")
    for _ in range(10):
        stays.used = stays.cap
        lending.look()
    assert stays.cap == 100 * MIB


def test_a_tenant_that_comes_may_at_first_store_no_more_than_a_segment(tmp_path: Path) -> None:
    given = (f"file.path={tmp_path}", "file.capacity=4GiB", "tenants.first.file.guaranteed=1GiB")
    settings = load_settings(None, given)

    async def main() -> None:
        tenants = Tenants(settings, wire_store, Metrics())
        await tenants.start()
        wanted = overridden(settings, ["tenants.late.file.guaranteed=1GiB"], adds="late")
        late = tenants.add(wanted, wanted.tenants[1])
        await tenants.start_one(late)
        part = tenants.file.part("late")
        assert part is not None
        assert part.cap == settings.file.segment_bytes  # the first may have borrowed the others
        tenants.file.look()
        assert part.cap >= part.least
        await tenants.close(0.0)

    asyncio.run(main())


def test_an_error_in_one_store_keeps_no_other_from_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants_module, "HOUSEKEEPING_S", 0.001)
    names = ("first", "second")
    guaranteed = [f"tenants.{name}.dram.guaranteed=8MiB" for name in names]
    settings = load_settings(None, ["file.path=", *guaranteed])
    turns = 0

    async def broken() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        tenants = Tenants(settings, wire_store, Metrics())
        first, second = tenants
        keep_house, kept = second.store.keep_house, asyncio.Event()

        async def counted() -> None:
            nonlocal turns
            turns += 1
            if turns == 3:
                kept.set()
            await keep_house()

        monkeypatch.setattr(first.store, "keep_house", broken)
        monkeypatch.setattr(second.store, "keep_house", counted)
        await tenants.start()
        async with asyncio.timeout(5):
            await kept.wait()
        failures = first.metrics.registry.get_sample_value(
            "kvstore_task_failures_total", {"task": "tenants_house"}
        )
        assert failures
        await tenants.close(0.0)

    asyncio.run(main())


def test_those_who_wait_for_room_go_on_in_turn_and_are_looked_for_together() -> None:
    """20 wait for what another tenant has borrowed and leases; one look is for all of them."""
    names, wait_s = ("borrows", "waits"), 0.2
    guaranteed = [f"tenants.{name}.dram.guaranteed=32MiB" for name in names]
    settings = load_settings(None, ["file.path=", "dram.capacity=64MiB", *guaranteed])
    looks = 0

    async def main() -> list[int]:
        nonlocal looks
        tenants = Tenants(settings, wire_store, Metrics())
        await tenants.start()
        borrows, waits = (tenants.dram.part(name) for name in names)
        assert isinstance(borrows, DramPart)
        assert isinstance(waits, DramPart)
        arena = tenants.get("borrows").store.arena
        held: list[Slot] = []
        while arena.physical_nbytes < 60 * MIB:  # nobody may evict it
            tenants.dram.look()
            slot = arena.allocate(MIB)
            held += [slot] if slot is not None else []
            await asyncio.sleep(0.001)
        assert waits.cap < waits.guaranteed
        look = tenants.dram.look

        def counted() -> None:
            nonlocal looks
            looks += 1
            look()

        tenants.dram.look = counted  # type: ignore[method-assign]
        order: list[int] = []

        async def ask(number: int, wait_s: float) -> None:
            await tenants.dram.room("waits", MIB, wait_s)
            order.append(number)

        await asyncio.gather(*(ask(number, wait_s) for number in range(20)))
        assert sorted(order) == list(range(20))
        assert looks <= wait_s / ROOM_POLL_S + wait_s / LOOK_S + 3  # one task looks in any case
        order.clear()
        asks = [asyncio.create_task(ask(number, 10.0)) for number in range(20)]
        for slot in held:
            arena.free(slot)
        await asyncio.gather(*asks)
        await tenants.close(0.0)
        return order

    assert asyncio.run(main()) == list(range(20))


def test_who_asks_for_less_than_its_guarantee_has_it_whole() -> None:
    """Caps are whole MiB, rounded down: the last part of one that is asked for is owed as well."""

    class Part(DramPart):
        """A part whose cap is all its room."""

        def __init__(self) -> None:
            self.guaranteed, self.most, self.weight, self.now = 8 * MIB, 8 * MIB, 1.0, MIB

        used = held = 0
        least = MIB // 16

        @property
        def cap(self) -> int:
            return self.now

        @property
        def free(self) -> int:
            return self.now

        def set_cap(self, nbytes: int) -> None:
            self.now = nbytes

    async def ask() -> None:
        lending = Lending(64 * MIB)
        lending.add("late", part)
        await asyncio.wait_for(lending.room("late", MIB + MIB // 4, wait_s=20.0), 20.0)

    part = Part()
    asyncio.run(ask())
    assert part.free >= MIB + MIB // 4


def test_a_store_that_cannot_be_closed_cuts_no_other_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("first", "second")
    guaranteed = [f"tenants.{name}.dram.guaranteed=8MiB" for name in names]
    settings = load_settings(None, ["file.path=", *guaranteed])

    async def main() -> None:
        tenants = Tenants(settings, wire_store, Metrics())
        first, second = tenants
        closed = False

        async def fails(_: float) -> None:
            raise DiskFailed("fdatasync: Input/output error")

        async def drains(drain_s: float) -> None:
            nonlocal closed
            await asyncio.sleep(0.05)
            await close_second(drain_s)
            closed = True

        await tenants.start()
        close_first, close_second = first.store.close, second.store.close
        monkeypatch.setattr(first.store, "close", fails)
        monkeypatch.setattr(second.store, "close", drains)
        with pytest.raises(DiskFailed):
            await tenants.close(1.0)
        assert closed
        await close_first(0.0)

    asyncio.run(main())
