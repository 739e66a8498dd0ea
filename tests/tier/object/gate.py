"""A real bucket that holds requests back for as long as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from kvstore.model.block import Buffer
from kvstore.tier.object import Bucket
from kvstore.tier.object.names import TOMBSTONES, Listed
from kvstore.tier.object.requests import Filled


class GatedBucket:
    """holds: says of a kind of request and a name whether it waits until `opened`. arrived: one
    does."""

    def __init__(self, bucket: Bucket) -> None:
        self.holds: Callable[[str, str], bool] = lambda kind, name: False
        self.arrived = asyncio.Event()
        self.opened = asyncio.Event()
        self._bucket = bucket

    async def pages(self, prefix: str) -> AsyncGenerator[list[Listed], None]:
        await self._pass("list", prefix)
        async for page in self._bucket.pages(prefix):
            yield page

    async def head(self, name: str) -> Listed:
        await self._pass("head", name)
        return await self._bucket.head(name)

    async def get(
        self, name: str, start: int, buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        await self._pass("get", name)
        await self._bucket.get(name, start, buffers, filled)
        await self._pass("got", name)

    async def put(
        self, name: str, buffers: Sequence[Buffer], nbytes: int, *, absent: bool = False
    ) -> int:
        await self._pass("put", name)
        return await self._bucket.put(name, buffers, nbytes, absent=absent)

    async def delete(self, names: Sequence[str]) -> None:
        await self._bucket.delete(names)

    def close(self) -> None:
        self._bucket.close()

    async def _pass(self, kind: str, name: str) -> None:
        if self.holds(kind, name):
            self.arrived.set()
            await self.opened.wait()


def buries(kind: str, name: str) -> bool:
    """Say whether it is a tombstone on its way to the bucket."""
    return kind == "put" and name.startswith(TOMBSTONES)
