from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.block import PAGE_NBYTES
from kvstore.frame import FrameHeader, FrameKind, RunBlock
from kvstore.testing.tier import TierContract
from kvstore.tier import Tier
from kvstore.tier.file import FileExtent, FileTier
from tests.tier_file.frames import NAMESPACE, key


class TestFileTier(TierContract[FileExtent]):
    direct = True
    segment_nbytes = 4 << 20
    payload_offset = PAGE_NBYTES

    @asynccontextmanager
    async def opened(self, directory: Path, capacity_bytes: int) -> AsyncIterator[Tier[FileExtent]]:
        tier = FileTier(
            directory,
            capacity_bytes=capacity_bytes,
            segment_nbytes=self.segment_nbytes,
            direct=self.direct,
        )
        await tier.open()
        yield tier
        await tier.close()

    async def put(self, tier: Tier[FileExtent], payload: Sequence[memoryview]) -> FileExtent | None:
        assert isinstance(tier, FileTier)
        blocks = tuple(RunBlock(key(0), len(page), len(page), 0, 0) for page in payload)
        header = FrameHeader(kind=FrameKind.RUN, sequence=1, namespace_id=NAMESPACE, blocks=blocks)
        place = tier.allocate(header.nbytes)
        if place is not None:
            await tier.write(place, [tier.encode(place, header), *payload])
        return place

    async def settle(self, tier: Tier[FileExtent]) -> None:
        assert isinstance(tier, FileTier)
        await tier.settle()


class TestFileTierBuffered(TestFileTier):
    direct = False
