"""The arena grows to its cap in the background, and waits while others need the memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial

from kvstore.model.block import padded
from kvstore.model.errors import ConfigError
from kvstore.system.memory import Memory
from kvstore.system.numa import cpus_for_arena
from kvstore.system.shared_mapping import SharedMapping
from kvstore.tier.dram.extent_memory import make_extent, make_touched_extent, touch
from kvstore.tier.dram.extents import Extents

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0  # at the memory that is free
SMALL_EXTENTS_MAX = 16  # beyond these, a small extent has to be worth its descriptor
SMALL_SHARE = 16  # of the arena, one part at least is worth a small extent
LENT_SMALL_SHARE = 48  # where caps move all the time, so that what is lent can be used


class Growth:
    """capacity_bytes: the cap. extent_bytes: of a full extent; none is larger.

    sealed: nobody but the daemon can write to the extents. coming_nbytes: of the extent that is
    being made. waits_for_memory: the next extent waits until other processes free memory. pauses:
    how often growth has waited since the start.
    """

    def __init__(
        self,
        extents: Extents,
        capacity_bytes: int,
        extent_bytes: int,
        memory: Callable[[], Memory],
        *,
        sealed: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.extent_bytes = padded(min(extent_bytes, self.capacity_bytes))
        self.promised_bytes = 0  # what it may be raised to at any time
        self.coming_nbytes = 0
        self.waits_for_memory = False
        self.pauses = 0
        self._extents = extents
        self.sealed = sealed
        self._extent_bytes_wanted = extent_bytes
        self._memory = memory
        self._cpus: frozenset[int] = frozenset()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the first extent, and the others in the background."""
        nbytes = min(self.extent_bytes, self.capacity_bytes)
        self._cpus = await asyncio.to_thread(cpus_for_arena)
        first = self._extents.add(*await self._made(make_extent, nbytes))
        loop = asyncio.get_running_loop()
        self._touching = loop.run_in_executor(None, touch, first.mapped)
        self._task = asyncio.create_task(self._grow())

    async def _made(
        self, make: Callable[..., tuple[int, SharedMapping]], nbytes: int
    ) -> tuple[int, SharedMapping]:
        """Make an extent in a thread. If cancelled, it is closed once the thread has made it."""
        making = _Making(partial(make, nbytes, cpus=self._cpus, sealed=self.sealed))
        try:
            return await asyncio.to_thread(making.run)
        except asyncio.CancelledError:
            making.abandon()
            raise

    async def stop(self) -> None:
        """Make no more extents."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def growing(self) -> bool:
        return self._task is not None and not self._task.done()

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap, and grow in the background if it is a higher one."""
        self.capacity_bytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        wanted = padded(min(self._extent_bytes_wanted, self.capacity_bytes))
        self.extent_bytes = max(self.extent_bytes, wanted)
        started = self._task is not None
        if started and not self.growing and self._wanted_nbytes > 0:
            self._task = asyncio.create_task(self._grow())

    async def _grow(self) -> None:
        await asyncio.shield(self._touching)
        while (nbytes := self._wanted_nbytes) > 0:
            if not await self._may_take(nbytes) or nbytes > self._wanted_nbytes:
                continue  # memory is short, or the cap was lowered meanwhile
            self.coming_nbytes = nbytes
            try:
                fd, mapped = await self._made(make_touched_extent, nbytes)
            except ConfigError as error:
                # Less cache is better than no daemon: keep the extents that could be reserved.
                self.capacity_bytes = self._extents.nbytes
                logger.warning(
                    "arena=short capacity_bytes=%d reason=%r", self.capacity_bytes, str(error)
                )
                return
            finally:
                self.coming_nbytes = 0
            if nbytes > self._wanted_nbytes:  # the cap was lowered meanwhile
                _close(fd, mapped)
            else:
                self._extents.add(fd, mapped)
        logger.info(
            "arena=complete extents=%d capacity_bytes=%d",
            len(self._extents.by_id),
            self.capacity_bytes,
        )

    @property
    def _wanted_nbytes(self) -> int:
        """Return the size of the next extent, 0 or less if none is to be made.

        Many small raises of the cap would make many small extents, and each takes a descriptor here
        and a mapping of every client. So small raises are summed up before they make an extent.
        """
        kept = self._extents.nbytes
        missing = self.capacity_bytes - kept
        share = LENT_SMALL_SHARE if self.promised_bytes else SMALL_SHARE
        small = sum(each.handle.nbytes < self.extent_bytes for each in self._extents)
        if small >= SMALL_EXTENTS_MAX and missing < min(self.extent_bytes, kept // share):
            return 0
        return min(self.extent_bytes, missing)

    async def _may_take(self, nbytes: int) -> bool:
        """Say whether an extent may be made without taking memory from engines. Waits before it
        returns False.

        When memory runs out, the kernel kills a process, and every process is worth more than the
        arena's next extent.
        """
        spare = (await asyncio.to_thread(self._memory)).spare_nbytes
        if spare < nbytes:
            if not self.waits_for_memory:
                self.waits_for_memory = True
                self.pauses += 1
                logger.warning(
                    "arena=waits reason='too little memory is free' wanted_bytes=%d spare_bytes=%d "
                    "reserved_bytes=%d capacity_bytes=%d",
                    nbytes,
                    spare,
                    self._extents.nbytes + self._extents.leaving_nbytes,
                    self.capacity_bytes,
                )
            await asyncio.sleep(LOOK_AGAIN_S)
            self.waits_for_memory = self._wanted_nbytes > 0
            return False
        if self.waits_for_memory:
            self.waits_for_memory = False
            logger.info("arena=grows_again spare_bytes=%d", spare)
        return True


class _Making:
    """An extent that a thread makes, as long as somebody waits for it."""

    def __init__(self, make: Callable[[], tuple[int, SharedMapping]]) -> None:
        self._make = make
        self._lock = threading.Lock()  # of both below
        self._made: tuple[int, SharedMapping] | None = None
        self._wanted = True

    def run(self) -> tuple[int, SharedMapping]:
        """Make it, in a thread. What was abandoned meanwhile is closed."""
        made = self._make()
        with self._lock:
            self._made = made
            if self._wanted:
                return made
        _close(*made)
        return made

    def abandon(self) -> None:
        """Close it, now or as soon as it is made."""
        with self._lock:
            self._wanted = False
            made = self._made
        if made is not None:
            _close(*made)


def _close(fd: int, mapped: SharedMapping) -> None:
    mapped.close()
    os.close(fd)
