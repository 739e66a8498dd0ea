"""One-sided links of this daemon: which drivers it has, and the arena they may read and write.

`cluster.links` names a driver, or leaves it to what is installed. Without an RDMA device that is up
there is none, unless UCX_TLS names the transports to use instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.model.errors import ConfigError
from kvstore.model.member import NodeId
from kvstore.peer.onesided.driver import Driver, DriverError, DriverMissing
from kvstore.peer.onesided.mover import Mover
from kvstore.settings import Settings
from kvstore.system.rdma import devices_up
from kvstore.tier.dram import Arena
from kvstore.tier.dram.extents import ExtentHandle, Extents

logger = logging.getLogger(__name__)

NAMES = ("ucx", "nixl")  # for auto, the first one that is installed


class Links:
    """The drivers that work here. movers: by name. why: in words, if there is none."""

    def __init__(self, settings: Settings, arena: Arena | None) -> None:
        """arena: None with several tenants, each of which has its own."""
        self._wanted = settings.cluster.links
        self._arena = arena
        self._memory: dict[int, memoryview] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop: list[Callable[[], None]] = []
        self.movers: dict[str, Mover] = {}
        self.why = ""

    @property
    def _extents(self) -> Extents:
        assert self._arena is not None  # else there is an obstacle
        return self._arena.extents

    async def start(self, node: NodeId, *, sealed: bool) -> None:
        """Open what `cluster.links` says. Raises ConfigError for a driver that is named and not
        installed."""
        self.why = self._obstacle(sealed=sealed)
        if not self.why:
            names = NAMES if self._wanted == "auto" else (self._wanted,)
            for name in names:
                if await self._open(name, node):
                    break
        if self.movers:
            self._stop.append(self._extents.on_extent(self._came))
            self._stop.append(self._extents.on_retired(self._left))
            logger.info("links=%s devices=%s", ",".join(self.movers), ",".join(devices_up()))
        elif self._wanted != "auto":
            logger.info("links=tcp reason=%r", self.why)

    def _obstacle(self, *, sealed: bool) -> str:
        """Return why there are no one-sided links, "" if there may be."""
        if self._wanted == "tcp":
            return "cluster.links=tcp"
        if self._arena is None:
            return "there are tenants, each with an arena of its own"
        if sealed:
            return "records are sealed, which one-sided reads cannot be"
        named = self._wanted != "auto" and os.environ.get("UCX_TLS")
        if not named and not devices_up():
            return "no RDMA device is up"
        return ""

    async def _open(self, name: str, node: NodeId) -> bool:
        mover = Mover(name, _maker(name, node))
        try:
            await mover.start()
            for extent in self._extents:
                await self._offer(mover, extent.handle.id)
        except DriverMissing as error:
            if self._wanted == name:
                raise ConfigError(f"cluster.links={name}: {error}") from error
            self.why = str(error)
            return False
        except DriverError as error:
            logger.warning("links=tcp instead_of=%s reason=%r", name, str(error))
            self.why = f"{name}: {error}"
            await mover.close()
            return False
        self.movers[name] = mover
        self.why = ""
        return True

    async def _offer(self, mover: Mover, number: int) -> None:
        extent = self._extents.by_id.get(number)
        if extent is None:  # it was retired meanwhile
            return
        view = self._memory.setdefault(number, extent.view[:])
        await mover.register(view)

    def _came(self, handle: ExtentHandle) -> None:
        for mover in self.movers.values():
            self._keep(self._offer(mover, handle.id))

    def _left(self, number: int) -> None:
        """Offer a retired extent no more. It stays mapped until the drivers have let go of it."""
        memory = self._memory.pop(number, None)
        if memory is not None:
            for mover in self.movers.values():
                self._keep(mover.withdraw(memory))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all drivers, and let go of the arena."""
        for stop in self._stop:
            stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for mover in self.movers.values():
            await mover.close()
        self._memory.clear()

    def stats(self) -> dict[str, Any]:
        """Return what `kvstore members` shows."""
        return {"drivers": list(self.movers), "why": self.why, "devices": devices_up()}


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except DriverError as error:  # what lies there is read over TCP
        logger.warning("links=partly reason=%r", str(error))


def _maker(name: str, node: NodeId) -> Callable[[], Driver]:
    """Return what opens a driver, and imports it. Called in its thread."""

    def make() -> Driver:
        if name == "nixl":
            from kvstore.peer.onesided.nixl import NixlDriver

            return NixlDriver(f"{node}-{os.urandom(4).hex()}")
        from kvstore.peer.onesided.ucx import UcxDriver

        return UcxDriver()

    return make
