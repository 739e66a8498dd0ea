"""A bucket in memory that some of the hosts share: slow, away, and wrong now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from random import Random

from kvstore.model.block import Buffer
from kvstore.tier.object.failure import ObjectExists, ObjectFailed, ObjectGone
from kvstore.tier.object.names import Listed
from kvstore.tier.object.requests import Filled

REQUEST_S = 0.01
AWAY_S = 1.0  # how often a request that nobody answers looks whether its connection was reset


@dataclass(slots=True)
class SimObjects:
    """What is stored, with the times of the store's own clock, which is `ahead_s` of the loop's.
    failing: the chance that a request fails. flipped: that a bit of what it reads is wrong. away:
    it answers nobody."""

    draw: Random
    ahead_s: float = 0.0
    failing: float = 0.0
    flipped: float = 0.0
    away: bool = False
    named: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def calm(self) -> None:
        self.failing = self.flipped = 0.0
        self.away = False


class SimBucket:
    """The bucket, as one life of a host has it. Implements `Bucket`."""

    def __init__(self, objects: SimObjects) -> None:
        self._objects = objects

    async def pages(self, prefix: str) -> AsyncGenerator[list[Listed], None]:
        await self._request("list")
        begin = f"{prefix}/" if prefix else ""
        page = [self._listed(n) for n in sorted(self._objects.named) if n.startswith(begin)]
        if page:
            yield page

    async def head(self, name: str) -> Listed:
        await self._request("head")
        self._of(name)
        return self._listed(name)

    async def get(
        self, name: str, start: int, buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        await self._request("get")
        data = bytearray(self._of(name))
        if self._objects.draw.random() < self._objects.flipped:
            data[self._objects.draw.randrange(len(data))] ^= 1
        if start + sum(map(len, buffers)) > len(data):
            raise ObjectFailed("get: not the bytes asked for", reason="short")
        for index, buffer in enumerate(buffers):
            buffer[:] = data[start : start + len(buffer)]
            start += len(buffer)
            filled(index)

    async def put(
        self, name: str, buffers: Sequence[Buffer], nbytes: int, *, absent: bool = False
    ) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        await self._request("put")
        if absent and name in self._objects.named:
            raise ObjectExists("put: there is one", reason="exists")
        now = asyncio.get_running_loop().time() + self._objects.ahead_s
        self._objects.named[name] = (data, now)
        return 1

    async def delete(self, names: Sequence[str]) -> None:
        await self._request("delete")
        for name in names:
            self._objects.named.pop(name, None)

    def close(self) -> None:
        """Nothing is open."""

    async def _request(self, kind: str) -> None:
        await asyncio.sleep(self._objects.draw.expovariate(1 / REQUEST_S))
        if self._objects.away:
            while self._objects.away:  # noqa: ASYNC110 - the clock is the simulation's
                await asyncio.sleep(AWAY_S)
            raise ObjectFailed(f"{kind}: connection reset", reason="connection")
        if self._objects.draw.random() < self._objects.failing:
            raise ObjectFailed(f"{kind}: HTTP 500", reason="server")

    def _of(self, name: str) -> bytes:
        try:
            return self._objects.named[name][0]
        except KeyError:
            raise ObjectGone("no such object", reason="gone") from None

    def _listed(self, name: str) -> Listed:
        data, modified = self._objects.named[name]
        return Listed(name, len(data), modified)
