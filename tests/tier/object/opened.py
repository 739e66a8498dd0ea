"""Object tiers for tests: on a real server or a folder, with their counters at hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.sealing import Sealing
from kvstore.settings import ObjectSettings
from kvstore.tier.object import Bucket, Found, ObjectTier, Outcome, Run
from kvstore.tier.object.connect import connect
from tests.tier.object.runs import NAMESPACE, Frame, reads_of, record

WAIT_S = 30.0
RUN_BLOCKS = 16
FAST = {"grace_s": 20.0, "timeout_s": 5.0}
# Of every tier that is opened here: a fixture sets it to run the same tests encrypted.
sealing: Sealing | None = None


class Clock:
    """A clock that tests set forward; the waits of the loop itself go by the real one."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Side:
    """One daemon's object tier."""

    def __init__(self, settings: ObjectSettings, bucket: Bucket | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.clock = Clock()
        self.bucket = bucket if bucket is not None else connect(settings)
        self.tier = ObjectTier(
            settings, self.metrics, bucket=self.bucket, sealing=sealing, now=self.clock
        )

    def counted(self, name: str) -> Any:
        return self.metrics.totals().get(name) or {}

    @property
    def requests(self) -> int:
        return int(sum(self.counted("object_requests").values()))

    def deadline(self, seconds: float = WAIT_S) -> float:
        return self.clock() + seconds

    async def write(self, frames: Sequence[Frame]) -> Run:
        return await self.tier.writes.write(frames, self.deadline())

    async def find(self, keys: Sequence[BlockKey], namespace_id: NamespaceId = NAMESPACE) -> Found:
        return await self.tier.lookups.find(
            namespace_id, keys, run_blocks=RUN_BLOCKS, deadline=self.deadline()
        )

    async def delete(self, keys: Sequence[BlockKey] | None) -> None:
        await self.tier.deletes.delete(NAMESPACE, keys, self.deadline())

    async def read_all(self, found: Found) -> int:
        """Read every record found and compare it; return how many there were."""
        reads, targets = reads_of(found)
        outcomes = await self.tier.reads.read(reads, self.deadline())
        assert set(outcomes) <= {Outcome.READ}
        for part, key, target in targets:
            expected = record(key, part)
            assert bytes(target[: len(expected)]) == expected
        return len(reads)


@asynccontextmanager
async def opened(
    settings: dict[str, Any], *, ready: bool = True, bucket: Bucket | None = None
) -> AsyncIterator[Side]:
    side = Side(ObjectSettings(**{**FAST, **settings}), bucket)
    side.tier.start()
    try:
        if ready:
            await side.tier.ready(side.deadline())
        yield side
    finally:
        await side.tier.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine."""

    async def bounded() -> None:
        async with asyncio.timeout(4 * WAIT_S):
            await test()

    asyncio.run(bounded())
