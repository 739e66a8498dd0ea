"""The daemon's copies from memory beside a sealed arena: by the native library, and without it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from kvstore.decide.planner import SessionId
from kvstore.decide.stored import HeldSlot
from kvstore.model.block import Slot
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, InvalidRequest
from kvstore.store import staging as module
from kvstore.store.staging import Staging
from kvstore.testing.wait import until
from kvstore.tier.dram import Arena
from kvstore_kernels import native

MIB = 1 << 20
SESSION, LEASE = SessionId(1), 7
SIZES = (1, 4096, 70_001, 3 * MIB, 9 * MIB)  # together past the processor's caches
RECORDS = [random.Random(nbytes).randbytes(nbytes) for nbytes in SIZES]


@pytest.fixture(autouse=True, params=["native", "python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(module, "shared_copies", lambda sources, targets: None)
    elif native.reason():
        pytest.skip(native.reason())


def copied(checksums: Sequence[int], times: int = 1) -> list[bytes]:
    """Stage the records, copy them with these checksums, and return what the arena has then."""

    async def main() -> list[bytes]:
        arena = Arena(32 * MIB, 32 * MIB, sealed=True)
        staging = Staging(arena)
        await arena.start()
        try:
            await asyncio.to_thread(until, lambda: arena.reserved_nbytes >= 32 * MIB)
            (handle,) = staging.handles(SESSION)
            held = [HeldSlot(_slot(arena, nbytes)) for nbytes in SIZES]
            slots = staging.place(SESSION, held)
            for slot, record in zip(slots, RECORDS, strict=True):
                assert slot is not None
                assert slot.extent == handle.id
                staging._areas[SESSION].view(slot)[:] = record
            staging.note(LEASE, SESSION, slots)
            for _ in range(times):
                await staging.copy(LEASE, held, checksums)
            return [bytes(arena.view(each.slot)) for each in held]
        finally:
            staging.close()
            await arena.close()

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def staged(capacity: int = 32 * MIB) -> AsyncIterator[tuple[Arena, Staging]]:
    arena = Arena(capacity, 32 * MIB, sealed=True)
    staging = Staging(arena)
    await arena.start()
    try:
        yield arena, staging
    finally:
        staging.close()
        await arena.close()


def _slot(arena: Arena, nbytes: int) -> Slot:
    slot = arena.allocate(nbytes)
    assert slot is not None
    return slot


def test_what_was_staged_arrives_whole() -> None:
    assert copied([checksum(each) for each in RECORDS]) == RECORDS


@pytest.mark.parametrize("wrong", range(len(SIZES)))
def test_a_record_that_differs_from_its_checksum_is_named(wrong: int) -> None:
    checksums = [checksum(each) for each in RECORDS]
    checksums[wrong] ^= 1
    with pytest.raises(CorruptBlock, match=f"record {wrong} "):
        copied(checksums)


def test_what_was_staged_is_copied_once() -> None:
    with pytest.raises(InvalidRequest, match="committed already"):
        copied([checksum(each) for each in RECORDS], times=2)


def present(fd: int) -> int:
    """Return how many bytes of a memfd there are."""
    return os.fstat(fd).st_blocks * 512


async def commit_unwritten(
    arena: Arena, staging: Staging, session: SessionId, sizes: Sequence[int]
) -> list[bytes]:
    """Reserve staging memory, write nothing there, and copy; return what the arena has then."""
    held = [HeldSlot(_slot(arena, nbytes)) for nbytes in sizes]
    staging.note(LEASE, session, staging.place(session, held))
    await staging.copy(LEASE, held, [checksum(bytes(nbytes)) for nbytes in sizes])
    return [bytes(arena.view(each.slot)) for each in held]


def test_what_a_client_never_wrote_is_read_as_zeros_and_takes_no_memory() -> None:
    sizes = (3 * MIB, 4096, 1, 70_001)

    async def main() -> None:
        async with staged() as (arena, staging):
            (handle,) = staging.handles(SESSION)
            assert await commit_unwritten(arena, staging, SESSION, sizes) == [
                bytes(nbytes) for nbytes in sizes
            ]
            assert present(handle.fd) == 0

    asyncio.run(main())


def test_one_page_that_is_missing_among_written_ones_is_not_made() -> None:
    record = random.Random(5).randbytes(3 * MIB)

    async def main() -> None:
        async with staged() as (arena, staging):
            (handle,) = staging.handles(SESSION)
            held = [HeldSlot(_slot(arena, len(record)))]
            (slot,) = staging.place(SESSION, held)
            assert slot is not None
            with mmap.mmap(handle.fd, handle.nbytes) as client:
                client[slot.offset : slot.offset + 1 * MIB] = record[:MIB]
                end = slot.offset + len(record)
                client[end - MIB : end] = record[-MIB:]
            staging.note(LEASE, SESSION, [slot])
            expected = record[:MIB] + bytes(MIB) + record[-MIB:]
            await staging.copy(LEASE, held, [checksum(expected)])
            assert bytes(arena.view(held[0].slot)) == expected
            assert present(handle.fd) == 2 * MIB

    asyncio.run(main())


def test_memory_of_a_session_that_ended_is_given_back_though_a_client_maps_it() -> None:
    async def main() -> None:
        async with staged() as (_, staging):
            (handle,) = staging.handles(SESSION)
            fd = os.dup(handle.fd)
            try:
                with mmap.mmap(fd, handle.nbytes) as client:
                    client[: 2 * MIB] = bytes(2 * MIB)
                    assert present(fd) == 2 * MIB
                    staging.end(SESSION)
                    await asyncio.to_thread(until, lambda: present(fd) == 0)
                    assert client[: 2 * MIB] == bytes(2 * MIB)
            finally:
                os.close(fd)

    asyncio.run(main())


def test_memory_is_not_given_back_while_records_are_copied_from_it() -> None:
    record = random.Random(6).randbytes(9 * MIB)

    async def main() -> None:
        async with staged() as (arena, staging):
            (handle,) = staging.handles(SESSION)
            fd = os.dup(handle.fd)
            held = [HeldSlot(_slot(arena, len(record)))]
            (slot,) = staging.place(SESSION, held)
            assert slot is not None
            staging._areas[SESSION].view(slot)[:] = record
            staging.note(LEASE, SESSION, [slot])
            copying = asyncio.create_task(staging.copy(LEASE, held, [checksum(record)]))
            await asyncio.sleep(0)  # its threads have work by now
            staging.end(SESSION)
            await copying
            assert bytes(arena.view(held[0].slot)) == record
            try:
                await asyncio.to_thread(until, lambda: present(fd) == 0)
            finally:
                os.close(fd)

    asyncio.run(main())


def test_all_sessions_together_have_as_much_as_the_arena() -> None:
    async def main() -> None:
        async with staged() as (_, staging):
            sizes = []
            for number in range(1, 100):
                sizes += [each.nbytes for each in staging.handles(SessionId(number))]
            assert 4 <= len(sizes) < 99
            assert sum(sizes) <= 32 * MIB
            assert sizes == sorted(sizes, reverse=True)
            staging.end(SessionId(1))
            await asyncio.to_thread(until, lambda: staging._area_nbytes() >= sizes[0] // 2)
            assert staging.handles(SessionId(99)) == []  # its other processes were told of none
            assert staging.handles(SessionId(100))
            assert staging.can_take(SessionId(2), sizes[1])
            assert not staging.can_take(SessionId(2), sizes[1] + 1)
            assert not staging.can_take(SessionId(99), 1)

    asyncio.run(main())
