"""The contract every tier keeps. Subclass it, say how to open one and how a place is written."""

from __future__ import annotations

import asyncio
import mmap
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.errors import InvalidRequest
from kvstore.tier import Tier

Place = TypeVar("Place")
CAPACITY_BYTES = 4 << 20
ROUNDS_MAX = 1000


def pages(nbytes: int, seed: int | str | None = None) -> memoryview:
    """Return page-aligned memory of whole pages, zeroed or random."""
    view = memoryview(mmap.mmap(-1, padded(nbytes)))
    if seed is not None:
        view[:] = random.Random(seed).randbytes(len(view))
    return view


class TierContract(Generic[Place]):
    """Subclass and override `opened`; `put`, `payload_offset` and `settle` where they differ.

    payload_offset: bytes a place holds before what `put` was given. place_fraction: of an empty
    tier, which one place may take.
    """

    payload_offset = 0
    place_fraction = 2

    def opened(
        self, directory: Path, capacity_bytes: int
    ) -> AbstractAsyncContextManager[Tier[Place]]:
        raise NotImplementedError("open an empty tier, close it at the end")

    async def put(self, tier: Tier[Place], payload: Sequence[memoryview]) -> Place | None:
        """Allocate and write, None if there is no room."""
        place = tier.allocate(sum(buffer.nbytes for buffer in payload))
        if place is not None:
            await tier.write(place, payload)
        return place

    async def settle(self, tier: Tier[Place]) -> None:
        """Wait until freed places can be allocated again."""

    async def get(self, tier: Tier[Place], place: Place, nbytes: int, offset: int = 0) -> bytes:
        target = pages(nbytes)
        await tier.read(place, self.payload_offset + offset, [target])
        return bytes(target)

    def run(self, test: Callable[[Tier[Place]], Awaitable[None]]) -> None:
        """Run a test on a fresh tier of 4 MiB."""

        async def main() -> None:
            with tempfile.TemporaryDirectory(prefix="kv-") as directory:
                async with self.opened(Path(directory), CAPACITY_BYTES) as tier:
                    await test(tier)

        asyncio.run(main())

    def test_what_is_written_is_read(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            for count in (1, 2, 7):
                payload = [pages((i + 1) * PAGE_NBYTES, seed=i) for i in range(count)]
                place = await self.put(tier, payload)
                assert place is not None
                whole = b"".join(payload)
                assert await self.get(tier, place, len(whole)) == whole

        self.run(test)

    def test_any_pages_of_a_place_are_read_into_several_targets(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            payload = pages(10 * PAGE_NBYTES, seed=1)
            place = await self.put(tier, [payload])
            assert place is not None
            targets = [pages(PAGE_NBYTES), pages(3 * PAGE_NBYTES), pages(2 * PAGE_NBYTES)]
            await tier.read(place, self.payload_offset + 2 * PAGE_NBYTES, targets)
            assert b"".join(targets) == payload[2 * PAGE_NBYTES : 8 * PAGE_NBYTES]

        self.run(test)

    def test_reads_and_writes_at_once_do_not_mix(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            payloads = [pages(padded(1 + 9000 * (i % 5)), seed=i) for i in range(40)]
            places = await asyncio.gather(*(self.put(tier, [payload]) for payload in payloads))
            gets = [
                self.get(tier, place, len(payload))
                for place, payload in zip(places, payloads, strict=True)
                if place is not None
            ]
            assert await asyncio.gather(*gets) == [bytes(payload) for payload in payloads]

        self.run(test)

    def test_a_full_tier_answers_none_and_keeps_its_cap(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            payload = pages(50 * PAGE_NBYTES, seed=3)
            places = await self.fill(tier, payload)
            assert len(places) * len(payload) >= tier.capacity_bytes // 2
            assert tier.physical_nbytes <= tier.capacity_bytes
            assert tier.allocate(len(payload)) is None
            for place in places:
                assert await self.get(tier, place, len(payload)) == payload

        self.run(test)

    def test_freed_room_is_given_again(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            payload = pages(50 * PAGE_NBYTES, seed=3)
            places = await self.fill(tier, payload)
            kept, freed = places[::2], places[1::2]
            for place in freed:
                tier.free(place)
            await self.settle(tier)
            again = await self.fill(tier, payload)
            assert len(again) >= len(freed) - 1
            assert tier.physical_nbytes <= tier.capacity_bytes
            for place in kept + again:
                assert await self.get(tier, place, len(payload)) == payload

        self.run(test)

    def test_what_was_set_aside_and_never_written_can_be_freed(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            before = tier.physical_nbytes
            nbytes = tier.capacity_bytes // self.place_fraction
            for _ in range(20):
                place = tier.allocate(nbytes)
                assert place is not None
                assert tier.physical_nbytes >= before + nbytes
                tier.free(place)
            assert tier.physical_nbytes == before

        self.run(test)

    def test_wrong_places_and_sizes_are_refused(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            place = await self.put(tier, [pages(PAGE_NBYTES, seed=1)])
            assert place is not None
            beyond = pages(2 * PAGE_NBYTES)
            with pytest.raises(InvalidRequest):
                await tier.read(place, self.payload_offset, [beyond])
            with pytest.raises(InvalidRequest):
                await tier.read(place, -PAGE_NBYTES, [beyond])
            for nbytes in (0, -1, 100 * tier.capacity_bytes):
                with pytest.raises(InvalidRequest):
                    tier.allocate(nbytes)
            tier.free(place)
            with pytest.raises(InvalidRequest):
                tier.free(place)
            with pytest.raises(InvalidRequest):
                await self.get(tier, place, PAGE_NBYTES)

        self.run(test)

    def test_a_cancelled_read_leaves_its_targets_alone_afterwards(self) -> None:
        async def test(tier: Tier[Place]) -> None:
            payload = pages(64 * PAGE_NBYTES, seed=1)
            place = await self.put(tier, [payload])
            assert place is not None
            for _ in range(20):
                target = pages(len(payload))
                read = asyncio.ensure_future(tier.read(place, self.payload_offset, [target]))
                await asyncio.sleep(0)
                read.cancel()
                await asyncio.wait([read])
                target[:] = bytes(len(target))
                assert await self.get(tier, place, len(payload)) == payload
                assert not any(target)

        self.run(test)

    async def fill(self, tier: Tier[Place], payload: memoryview) -> list[Place]:
        """Put `payload` until there is no room."""
        places: list[Place] = []
        for _ in range(ROUNDS_MAX):
            place = await self.put(tier, [payload])
            if place is None:
                return places
            places.append(place)
        raise AssertionError("the tier never fills up")
