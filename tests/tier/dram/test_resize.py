"""A cap that changes: memory comes and goes, and no slot that is held ever changes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from kvstore.model.block import Slot
from kvstore.system.shared_mapping import SharedMapping
from kvstore.testing.holes import allow_holes, punch
from kvstore.testing.wait import until
from kvstore.tier.dram import Arena, extent_memory, growth, holes, retired
from kvstore.tier.dram.extent_memory import _forbid_holes, make_extent

MIB = 1 << 20
PAGE = 4096


def present(arena: Arena) -> int:
    """Return what the kernel says the arena takes."""
    return sum(os.fstat(each.fd).st_blocks * 512 for each in arena.extents.handles())


async def grown(arena: Arena) -> None:
    while arena.growth.growing:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def shrunk(arena: Arena) -> None:
    arena.holes.give_back()
    await arena.holes.given_back()


async def renewed(arena: Arena) -> int:
    """Look once, and wait until what was touched is given back; return how much that was."""
    touched = await arena.holes.renew()
    if (punching := arena.holes._punching_again) is not None:
        await punching
    return touched


def with_arena(work: Callable[[Arena], Awaitable[None]]) -> None:
    async def run() -> None:
        arena = Arena(8 * MIB, 2 * MIB)
        await arena.start()
        await grown(arena)
        await work(arena)
        await arena.close()

    asyncio.run(run())


def fill(arena: Arena, nbytes: int = MIB // 2) -> list[Slot]:
    slots = []
    while (slot := arena.allocate(nbytes)) is not None:
        arena.view(slot)[:] = bytes([len(slots) % 251]) * nbytes
        slots.append(slot)
    return slots


def test_what_is_free_goes_back_at_once_and_whole_extents_are_retired() -> None:
    async def work(arena: Arena) -> None:
        gone: list[int] = []
        arena.extents.on_retired(gone.append)
        arena.growth.set_capacity(3 * MIB)
        assert arena.holes.excess_nbytes == 5 * MIB
        await shrunk(arena)
        assert arena.holes.excess_nbytes == 0
        assert arena.reserved_nbytes == present(arena) == 3 * MIB
        assert sorted(gone) == [2, 3]
        assert len(fill(arena)) == 6

    with_arena(work)


def test_what_is_held_stays_as_it_is_until_it_is_free() -> None:
    async def work(arena: Arena) -> None:
        slots = fill(arena)
        assert len(slots) == 16
        arena.growth.set_capacity(2 * MIB)
        assert arena.allocate(PAGE) is None
        assert arena.holes.give_back() == 0
        random.Random(5).shuffle(slots)
        kept, freed = slots[:4], slots[4:]
        contents = [bytes(arena.view(slot)) for slot in kept]
        for slot in freed:
            arena.free(slot)
            assert arena.allocate(PAGE) is None or arena.physical_nbytes <= arena.capacity_bytes
            await shrunk(arena)
        assert arena.physical_nbytes == arena.reserved_nbytes == present(arena) == 2 * MIB
        assert [bytes(arena.view(slot)) for slot in kept] == contents
        assert not arena.holes.punched()  # its own holes are not a client's

    with_arena(work)


def test_all_extents_give_back_at_once_each_by_one_thread_that_takes_all_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(4, timeout=60)
    go_on = threading.Event()
    calls: list[int] = []  # how many runs each call gave back

    def held_up(fd: int, runs: Sequence[tuple[int, int]], lock: threading.Lock) -> None:
        calls.append(len(runs))
        if len(calls) <= 4:
            together.wait()  # breaks unless every extent has a thread of its own
            assert go_on.wait(60)
        real(fd, runs, lock)

    async def work(arena: Arena) -> None:
        slots = fill(arena)
        arena.growth.set_capacity(0)
        for first in (0, 2, 1):  # slots of every extent; then those beside them
            for slot in slots[first::4]:
                arena.free(slot)
            arena.holes.give_back()
            await asyncio.sleep(0.05)
        assert arena.extents.leaving_nbytes == 6 * MIB
        assert arena.reserved_nbytes == 8 * MIB  # the system has none of it yet
        go_on.set()
        await arena.holes.given_back()
        assert calls == [1] * 4 + [2] * 4
        assert arena.reserved_nbytes == present(arena) == 2 * MIB

    real = holes.punch
    monkeypatch.setattr(holes, "punch", held_up)
    with_arena(work)


def test_an_arena_that_is_closed_while_it_gives_memory_back_keeps_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def held_up(*_: object) -> None:
        assert go_on.wait(60)

    async def work(arena: Arena) -> None:
        arena.growth.set_capacity(0)
        arena.holes.give_back()
        await asyncio.sleep(0.01)

    monkeypatch.setattr(holes, "punch", held_up)
    monkeypatch.setattr(holes, "THREADS", 2)  # of four extents, two wait for a thread
    before = arena_descriptors()
    with_arena(work)
    assert arena_descriptors() <= before + 2
    go_on.set()
    until(lambda: arena_descriptors() == before)


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_an_extent_that_is_made_under_the_close_is_closed_as_well(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held_up(nbytes: int, cpus: Set[int], *, sealed: bool) -> tuple[int, SharedMapping]:
        begun.set()
        assert go_on.wait(60)
        return make_extent(nbytes, cpus, sealed=sealed)

    async def main() -> None:
        arena = Arena(8 * MIB, 2 * MIB)
        starting = asyncio.create_task(arena.start())
        await asyncio.to_thread(begun.wait, 60)
        starting.cancel()  # as when a tenant is not added after all; else it has ended
        await asyncio.gather(starting, return_exceptions=True)
        await arena.close()
        assert arena_descriptors() == before
        go_on.set()

    monkeypatch.setattr(growth, "make_extent" if first else "make_touched_extent", held_up)
    before = arena_descriptors()
    asyncio.run(main())
    until(lambda: arena_descriptors() == before)


def arena_descriptors() -> int:
    """Return how many descriptors of extents this process has."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "kvstore-arena" in os.readlink(link)
    return found


def test_a_raised_cap_takes_new_extents_and_no_hole() -> None:
    async def work(arena: Arena) -> None:
        slots = fill(arena)
        for slot in slots[::2]:
            arena.free(slot)
        arena.growth.set_capacity(4 * MIB)
        await shrunk(arena)
        before = {each.id for each in arena.extents.handles()}
        contents = [bytes(arena.view(slot)) for slot in slots[1::2]]
        arena.growth.set_capacity(8 * MIB)
        await grown(arena)
        assert arena.reserved_nbytes == present(arena) == 8 * MIB
        new = fill(arena)
        assert len(new) == 8
        assert {slot.extent for slot in new}.isdisjoint(before)
        assert [bytes(arena.view(slot)) for slot in slots[1::2]] == contents

    with_arena(work)


def test_many_small_raises_make_few_extents_and_are_summed_up() -> None:
    async def run() -> None:
        arena = Arena(2 * MIB, 2 * MIB)
        await arena.start()
        for raised in range(1, 513):
            arena.growth.set_capacity(2 * MIB + raised * 4 * PAGE)
            await grown(arena)
        assert len(arena.extents.handles()) < 48
        assert 0 <= arena.capacity_bytes - arena.reserved_nbytes < arena.reserved_nbytes // 16
        arena.growth.set_capacity(arena.capacity_bytes + 2 * MIB)
        await grown(arena)
        assert arena.capacity_bytes - arena.reserved_nbytes < arena.reserved_nbytes // 16
        await arena.close()

    asyncio.run(run())


def test_a_cap_beyond_that_of_the_start_takes_larger_records() -> None:
    async def run() -> None:
        arena = Arena(MIB, 4 * MIB)
        await arena.start()
        assert arena.record_nbytes_max == MIB
        arena.growth.set_capacity(8 * MIB)
        await grown(arena)
        assert arena.record_nbytes_max == 4 * MIB
        assert arena.allocate(3 * MIB) is not None
        await arena.close()

    asyncio.run(run())


def test_an_extent_that_is_being_made_when_the_cap_is_lowered_is_not_kept() -> None:
    async def work(arena: Arena) -> None:
        before = [each.id for each in arena.extents.handles()]
        arena.growth.set_capacity(32 * MIB)
        while arena.reserved_nbytes == 8 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0)
        arena.growth.set_capacity(8 * MIB)
        await grown(arena)
        assert arena.holes.excess_nbytes == 0
        assert arena.reserved_nbytes == present(arena) == 8 * MIB
        assert [each.id for each in arena.extents.handles()] == before

    with_arena(work)


def test_pages_that_a_client_touches_again_go_back_again() -> None:
    async def work(arena: Arena) -> None:
        slot = arena.allocate(PAGE)  # keeps the first extent alive
        arena.growth.set_capacity(MIB)
        await shrunk(arena)
        (extent,) = arena.extents.handles()
        os.pwrite(extent.fd, b"x" * PAGE, extent.nbytes - PAGE)
        assert present(arena) == MIB + PAGE
        assert await renewed(arena) == PAGE
        assert present(arena) == MIB
        assert slot is not None

    with_arena(work)


def test_a_retired_extent_that_a_client_touches_again_goes_back_again() -> None:
    async def work(arena: Arena) -> None:
        (*_, last) = arena.extents.handles()
        kept = os.dup(last.fd)
        arena.growth.set_capacity(6 * MIB)
        await shrunk(arena)
        assert last.closed
        assert await renewed(arena) == 0
        os.pwrite(kept, b"x" * MIB, 0)
        assert await renewed(arena) == MIB
        assert os.fstat(kept).st_blocks == 0
        os.pwrite(kept, b"x" * PAGE, MIB)
        assert await renewed(arena) == PAGE
        os.close(kept)

    with_arena(work)


def test_nobody_waits_while_what_was_touched_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(fd: int, runs: Sequence[tuple[int, int]], lock: threading.Lock) -> None:
        assert go_on.wait(10)
        extent_memory.punch(fd, runs, lock)

    async def work(arena: Arena) -> None:
        kept = [os.dup(each.fd) for each in arena.extents.handles()]
        arena.growth.set_capacity(0)
        await shrunk(arena)
        monkeypatch.setattr(holes, "punch", slow)
        for fd in kept:
            os.pwrite(fd, b"x" * PAGE, 0)
        async with asyncio.timeout(5):
            assert await arena.holes.renew() == 4 * PAGE
            assert await arena.holes.renew() == 0  # they are being given back
        go_on.set()
        assert arena.holes._punching_again is not None
        await arena.holes._punching_again
        for fd in kept:
            assert os.fstat(fd).st_blocks == 0
            os.close(fd)

    with_arena(work)


def test_what_a_punch_leaves_there_nobody_has_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves_a_page(fd: int, runs: Sequence[tuple[int, int]], lock: threading.Lock) -> None:
        """As where a huge page is held that is not split."""
        extent_memory.punch(fd, runs, lock)
        os.pwrite(fd, bytes(PAGE), runs[0][0])

    async def work(arena: Arena) -> None:
        monkeypatch.setattr(holes, "punch", leaves_a_page)
        slot = arena.allocate(PAGE)  # keeps the first extent alive
        kept = [os.dup(each.fd) for each in arena.extents.handles()]
        arena.growth.set_capacity(MIB)
        await shrunk(arena)
        assert [await renewed(arena) for _ in range(3)] == [0, 0, 0]
        for fd in kept:
            os.pwrite(fd, b"x" * PAGE, 2 * MIB - PAGE)
        assert await renewed(arena) == 4 * PAGE
        monkeypatch.setattr(holes, "punch", extent_memory.punch)
        assert await renewed(arena) == 0
        assert present(arena) == MIB
        for fd in kept:
            os.close(fd)
        assert slot is not None

    with_arena(work)


def test_a_retired_extent_is_watched_for_a_while_and_not_too_many_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retired, "WATCHED_MAX", 2)
    monkeypatch.setattr(retired, "QUIET_LOOKS", 3)
    before = arena_descriptors()

    async def work(arena: Arena) -> None:
        assert arena_descriptors() == before + 4
        arena.growth.set_capacity(0)
        await shrunk(arena)
        assert len(list(arena.extents.retired)) == 2
        assert arena_descriptors() == before + 2
        for left in (2, 2, 0):
            await arena.holes.renew()
            assert arena_descriptors() == before + left

    with_arena(work)


def test_larger_records_find_room_where_small_ones_left_holes() -> None:
    async def work(arena: Arena) -> None:
        small = fill(arena, 64 << 10)
        for slot in small[::2]:
            arena.free(slot)
        arena.growth.set_capacity(4 * MIB)
        await shrunk(arena)
        for slot in small[1::2]:
            arena.free(slot)
        assert arena.allocate(MIB) is None  # nowhere are two runs side by side
        await arena.holes.renew()
        await grown(arena)
        assert arena.reserved_nbytes == present(arena) == 4 * MIB
        assert len(fill(arena, MIB)) == 4

    with_arena(work)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_changes_keeps_caps_and_bytes(seed: int) -> None:
    rng = random.Random(seed)

    async def work(arena: Arena) -> None:
        held: dict[Slot, int] = {}
        for step in range(120):
            match rng.randrange(4):
                case 0:
                    arena.growth.set_capacity(rng.randrange(1, 12) * MIB)
                case 1 if held:
                    for slot in rng.sample(list(held), rng.randrange(1, len(held) + 1)):
                        assert arena.view(slot)[0] == arena.view(slot)[-1] == held.pop(slot)
                        arena.free(slot)
                case 2:
                    await shrunk(arena)
                    await arena.holes.renew()
                case _:
                    slot = arena.allocate(rng.randrange(1, MIB))
                    if slot is not None:
                        assert arena.physical_nbytes <= arena.capacity_bytes
                        view, value = arena.view(slot), step % 251
                        view[0] = view[-1] = value
                        held[slot] = value
        for slot, value in held.items():
            assert arena.view(slot)[0] == arena.view(slot)[-1] == value
            arena.free(slot)
        await shrunk(arena)
        await grown(arena)
        await shrunk(arena)
        assert arena.physical_nbytes == 0
        assert arena.reserved_nbytes == present(arena) == arena.capacity_bytes

    with_arena(work)


def test_pages_are_taken_back_where_holes_are_forbidden() -> None:
    """A client may punch in the moment in which the daemon itself gives memory back."""

    async def work(arena: Arena) -> None:
        extent = arena.extents.handles()[0]
        allow_holes(extent.fd)
        punch(extent.fd, 0, 4 * PAGE)
        _forbid_holes(extent.fd)
        assert arena.holes.punched() == [(extent.id, 4 * PAGE)]
        await arena.holes.refill(extent.id)
        assert arena.holes.punched() == []
        with_flag = pytest.raises(PermissionError) if holes_are_forbidden() else nullcontext()
        with with_flag:
            punch(extent.fd, 0, PAGE)

    with_arena(work)


def holes_are_forbidden() -> bool:
    """Whether this process may forbid them, on this kernel."""
    fd, mapped = make_extent(PAGE, set())
    try:
        punch(fd, 0, PAGE)
    except PermissionError:
        return True
    finally:
        mapped.close()
        os.close(fd)
    return False


def test_a_shrink_without_a_descriptor_left_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(arena: Arena) -> None:
        slot = arena.allocate(PAGE)
        assert slot is not None
        dup, failed = os.dup, []

        def none_left(fd: int) -> int:
            if not failed:
                failed.append(fd)
                raise OSError(errno.EMFILE, "too many open files")
            return dup(fd)

        monkeypatch.setattr(os, "dup", none_left)
        arena.growth.set_capacity(PAGE)
        await shrunk(arena)
        assert failed
        await shrunk(arena)
        assert arena.reserved_nbytes <= 2 * MIB

    with_arena(work)


def test_all_of_an_arena_goes_back_although_somebody_keeps_it_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retired, "QUIET_LOOKS", 3)

    async def work(arena: Arena) -> None:
        fill(arena)
        kept = [os.dup(each.fd) for each in arena.extents.handles()]
        await arena.retire()
        assert arena.is_watched
        assert arena.reserved_nbytes == 0
        assert arena.allocate(PAGE) is None
        assert not any(os.fstat(each).st_blocks for each in kept)
        os.pwrite(kept[0], b"x" * PAGE, 0)
        assert await renewed(arena) == PAGE
        assert not any(os.fstat(each).st_blocks for each in kept)
        for _ in range(3):
            assert await renewed(arena) == 0
        assert not arena.is_watched
        assert arena.reserved_nbytes == 0
        for each in kept:
            os.close(each)

    with_arena(work)
