from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.format.frame import FrameHeader, FrameKind, RunBlock
from kvstore.model.block import PAGE_NBYTES
from kvstore.sealing import Sealing
from kvstore.testing.tier import TierContract
from kvstore.tier import Tier
from kvstore.tier.file import Devices, FileExtent, FileTier, Placed
from kvstore.tier.file.devices.frames import DeviceFrames
from kvstore.tier.file.frames import Frames
from tests.tier.file.frames import NAMESPACE, SEALING, FrameIndex, key


class TestFileTier(TierContract[FileExtent]):
    direct = True
    segment_nbytes = 4 << 20
    sealing: Sealing | None = None
    payload_offset = PAGE_NBYTES

    @asynccontextmanager
    async def opened(self, directory: Path, capacity_bytes: int) -> AsyncIterator[Tier[FileExtent]]:
        tier = FileTier(
            directory,
            capacity_bytes=capacity_bytes,
            segment_nbytes=self.segment_nbytes,
            direct=self.direct,
            sealing=self.sealing,
        )
        await tier.open()
        self.settled = tier.upkeep.settle
        yield tier.frames
        await tier.close()

    async def put(self, tier: Tier[FileExtent], payload: Sequence[memoryview]) -> FileExtent | None:
        assert isinstance(tier, Frames)
        header = _header(payload)
        place = tier.allocate(header.nbytes)
        if place is not None:
            await tier.write(place, [tier.encode(place, header), *payload])
        return place

    async def settle(self, tier: Tier[FileExtent]) -> None:
        await self.settled()


class TestFileTierBuffered(TestFileTier):
    direct = False


class TestFileTierSealed(TestFileTier):
    sealing = SEALING


class TestDevices(TierContract[Placed]):
    payload_offset = PAGE_NBYTES
    place_fraction = 4

    @asynccontextmanager
    async def opened(self, directory: Path, capacity_bytes: int) -> AsyncIterator[Tier[Placed]]:
        tier = Devices(
            [directory / "a", directory / "b"],
            capacity_bytes=capacity_bytes // 2,
            segment_nbytes=4 << 20,
        )
        await tier.open(FrameIndex(tier))
        self.settled = tier.settle
        yield tier.frames
        await tier.close()

    async def put(self, tier: Tier[Placed], payload: Sequence[memoryview]) -> Placed | None:
        assert isinstance(tier, DeviceFrames)
        header = _header(payload)
        place = tier.allocate(header.nbytes)
        if place is not None:
            await tier.write(place, [tier.encode(place, header), *payload])
        return place

    async def settle(self, tier: Tier[Placed]) -> None:
        await self.settled()


def _header(payload: Sequence[memoryview]) -> FrameHeader:
    blocks = tuple(RunBlock(key(0), len(page), len(page), 0, 0) for page in payload)
    return FrameHeader(kind=FrameKind.RUN, sequence=1, namespace_id=NAMESPACE, blocks=blocks)
