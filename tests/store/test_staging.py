"""The daemon's copies from memory beside a sealed arena: by the native library, and without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

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
                module._view(staging._areas[SESSION], slot)[:] = record
            staging.note(LEASE, SESSION, slots)
            for _ in range(times):
                await staging.copy(LEASE, held, checksums)
            return [bytes(arena.view(each.slot)) for each in held]
        finally:
            staging.close()
            await arena.close()

    return asyncio.run(main())


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
