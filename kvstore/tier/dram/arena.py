"""The arena: memfd extents that the daemon and its clients map at the same time.

A memfd, because a file in /dev/shm would outlive a crash, and because it is not subject to the
64 MiB that containers give /dev/shm: running out there kills the engine with SIGBUS. An extent's
pages are reserved (fallocate) before anybody may touch it and it is sealed against shrinking, so
that no mapping of it can fault. Reserving a gigabyte takes a fraction of a second, so the first
extent exists when the daemon starts and a background task makes the others. It also touches every
page once: a disk reads into pages that nobody has touched yet at half the speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.block import Slot, padded
from kvstore.checksum import copy_bytes
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.memory import Memory, read_memory
from kvstore.numa import cpus_for_arena
from kvstore.tier.dram.allocator import ExtentAllocator
from kvstore.tier.dram.extent_memory import (
    make_extent,
    make_touched_extent,
    missing_nbytes,
    refill,
    touch,
)

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0  # at memory that others had taken


@dataclass(frozen=True, slots=True)
class ExtentHandle:
    """What a client needs to map an extent: its id, its memfd (owned by the arena) and its size."""

    id: int
    fd: int
    nbytes: int


class Arena:
    """The dram tier. Slots are places; whoever maps the arena may read and write all of it.

    memory: says what may be taken; it is asked before each extent but the first.
    """

    def __init__(
        self,
        capacity_bytes: int,
        extent_bytes: int,
        *,
        memory: Callable[[], Memory] = read_memory,
    ) -> None:
        self.capacity_bytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._extent_bytes = padded(min(extent_bytes, self.capacity_bytes))
        self._handles: list[ExtentHandle] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._free: list[ExtentAllocator] = []
        self._callbacks: list[Callable[[ExtentHandle], None]] = []
        self._grow_task: asyncio.Task[None] | None = None
        self._cpus: frozenset[int] = frozenset()
        self._memory = memory
        self.waits_for_memory = False
        self.growth_pauses = 0  # ever: how often others had taken the memory

    @property
    def reserved_nbytes(self) -> int:
        """Bytes taken from the system so far; the rest of `capacity_bytes` is still to come."""
        return sum(handle.nbytes for handle in self._handles)

    @property
    def physical_nbytes(self) -> int:
        """Bytes of the slots that are taken, in whole pages."""
        return sum(extent.used for extent in self._free)

    @property
    def record_nbytes_max(self) -> int:
        """The largest record that fits at all."""
        return self._extent_bytes

    async def start(self) -> None:
        """Make the first extent, and the others in the background."""
        nbytes = min(self._extent_bytes, self.capacity_bytes)
        self._cpus = await asyncio.to_thread(cpus_for_arena)
        self._add(*await asyncio.to_thread(make_extent, nbytes, self._cpus))
        self._grow_task = asyncio.create_task(self._grow())

    async def close(self) -> None:
        """Unmap. Views handed out must be gone, or their extent stays mapped until they are."""
        if self._grow_task is not None:
            self._grow_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._grow_task
        for handle in self._handles:
            os.close(handle.fd)
        self._handles.clear()
        for view in self._views:
            view.release()
        for extent in self._maps:
            with contextlib.suppress(BufferError):
                extent.close()

    def extents(self) -> list[ExtentHandle]:
        return list(self._handles)

    def on_extent(self, callback: Callable[[ExtentHandle], None]) -> Callable[[], None]:
        """Call `callback` for every extent made from now on; returns how to stop that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    @property
    def growing(self) -> bool:
        return self._grow_task is not None and not self._grow_task.done()

    def punched(self) -> list[tuple[int, int]]:
        """Return extents that lack pages, and how many bytes of each: a client has punched holes
        into them."""
        found = [(each.id, missing_nbytes(each.fd, each.nbytes)) for each in self._handles]
        return [(extent, missing) for extent, missing in found if missing]

    async def refill(self, extent: int) -> None:
        """Take the pages that an extent lacks anew: zeros. Raises OSError without memory."""
        handle = self._handles[extent]
        fd = os.dup(handle.fd)  # the thread may outlive this arena

        def work() -> None:
            try:
                refill(fd, handle.nbytes)
            finally:
                os.close(fd)

        await asyncio.to_thread(work)

    def allocate(self, nbytes: int) -> Slot | None:
        """Take a slot of `nbytes` (a multiple of pages is set aside), or return None."""
        if not 1 <= nbytes <= self._extent_bytes:
            raise InvalidRequest(f"a slot of {nbytes} bytes; extents have {self._extent_bytes}")
        for index, extent in enumerate(self._free):
            offset = extent.allocate(nbytes)
            if offset is not None:
                return Slot(index, offset, nbytes)
        return None

    def free(self, place: Slot) -> None:
        self._free[place.extent].free(place.offset, place.nbytes)

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes, writable, valid until the slot is freed."""
        return self._views[slot.extent][slot.offset : slot.offset + slot.nbytes]

    def padded_view(self, slot: Slot) -> memoryview:
        """Return the slot's whole pages: aligned, a multiple of 4 KiB, as O_DIRECT wants them."""
        end = slot.offset + padded(slot.nbytes)
        return self._views[slot.extent][slot.offset : end]

    def clear_padding(self, slot: Slot) -> None:
        """Zero what fills up the slot's last page: it is what an earlier record left there."""
        padding = self.padded_view(slot)[slot.nbytes :]
        padding[:] = bytes(len(padding))

    async def write(self, place: Slot, buffers: Sequence[memoryview]) -> None:
        """Copy `buffers`, back to back, into the slot."""
        view, at = self._checked(place), 0
        for source in buffers:
            copy_bytes(source, view[at : at + len(source)])
            at += len(source)

    async def read(self, place: Slot, offset: int, targets: Sequence[memoryview]) -> None:
        """Copy from `offset` of the slot into `targets`, one after the other."""
        view, at = self._checked(place), offset
        if offset < 0 or offset + sum(map(len, targets)) > len(view):
            raise InvalidRequest(f"a read beyond the {len(view)} bytes of a slot")
        for target in targets:
            copy_bytes(view[at : at + len(target)], target)
            at += len(target)

    def _checked(self, place: Slot) -> memoryview:
        if not self._free[place.extent].holds(place.offset, place.nbytes):
            raise InvalidRequest(f"{place} is not allocated")
        return self.padded_view(place)

    async def _grow(self) -> None:
        made = self.reserved_nbytes
        await asyncio.to_thread(touch, self._maps[0])
        while made < self.capacity_bytes:
            nbytes = min(self._extent_bytes, self.capacity_bytes - made)
            await self._wait_for_memory(nbytes)
            try:
                self._add(*await asyncio.to_thread(make_touched_extent, nbytes, self._cpus))
            except ConfigError as error:
                # Less cache is better than no daemon: stay with what could be reserved.
                logger.warning("arena=short capacity_bytes=%d reason=%r", made, str(error))
                self.capacity_bytes = made
                return
            made += nbytes
        logger.info("arena=complete extents=%d capacity_bytes=%d", len(self._handles), made)

    async def _wait_for_memory(self, nbytes: int) -> None:
        """Return when `nbytes` may be taken without taking them from engines.

        The kernel kills somebody when memory runs out, and the arena's next extent is worth less
        than any process of this machine.
        """
        while (spare := (await asyncio.to_thread(self._memory)).spare_nbytes) < nbytes:
            if not self.waits_for_memory:
                self.waits_for_memory = True
                self.growth_pauses += 1
                logger.warning(
                    "arena=waits reason='too little memory is free' wanted_bytes=%d spare_bytes=%d "
                    "reserved_bytes=%d capacity_bytes=%d",
                    nbytes,
                    spare,
                    self.reserved_nbytes,
                    self.capacity_bytes,
                )
            await asyncio.sleep(LOOK_AGAIN_S)
        if self.waits_for_memory:
            self.waits_for_memory = False
            logger.info("arena=grows_again spare_bytes=%d", spare)

    def _add(self, fd: int, mapped: mmap.mmap) -> None:
        handle = ExtentHandle(len(self._handles), fd, len(mapped))
        self._handles.append(handle)
        self._maps.append(mapped)
        self._views.append(memoryview(mapped))
        self._free.append(ExtentAllocator(len(mapped)))
        for callback in list(self._callbacks):
            callback(handle)
