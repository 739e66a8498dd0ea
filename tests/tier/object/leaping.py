"""A real bucket whose clock tests set forward, so that nobody waits for objects to grow old."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence

from kvstore.model.block import Buffer
from kvstore.tier.object import Bucket
from kvstore.tier.object.names import Listed
from kvstore.tier.object.requests import Filled


class LeapingBucket:
    """What is put after `leap(s)` is `s` seconds younger than it would have been."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._ahead_s = 0.0
        self._put_ahead_s: defaultdict[str, float] = defaultdict(float)

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds

    async def pages(self, prefix: str) -> AsyncGenerator[list[Listed], None]:
        async for page in self._bucket.pages(prefix):
            yield [self._leapt(listed) for listed in page]

    async def head(self, name: str) -> Listed:
        return self._leapt(await self._bucket.head(name))

    async def get(
        self, name: str, start: int, buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        await self._bucket.get(name, start, buffers, filled)

    async def put(
        self, name: str, buffers: Sequence[Buffer], nbytes: int, *, absent: bool = False
    ) -> int:
        self._put_ahead_s[name] = self._ahead_s
        return await self._bucket.put(name, buffers, nbytes, absent=absent)

    async def delete(self, names: Sequence[str]) -> None:
        await self._bucket.delete(names)

    def close(self) -> None:
        self._bucket.close()

    def _leapt(self, listed: Listed) -> Listed:
        return listed._replace(modified=listed.modified + self._put_ahead_s[listed.name])
