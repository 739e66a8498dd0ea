"""The arena: memfd extents that the daemon and its clients map at the same time.

A memfd, because a file in /dev/shm would outlive a crash, and because it is not subject to the
64 MiB that containers give /dev/shm: running out there kills the engine with SIGBUS. An extent's
pages are reserved (fallocate) before anybody may touch it and it is sealed against shrinking, so
that no mapping of it can fault. Reserving a gigabyte takes a fraction of a second, so the first
extent exists when the daemon starts and a background task makes the others. It also touches every
page once: a disk reads into pages that nobody has touched yet at half the speed.

A lowered cap gives memory back at once: free runs are taken out of use for ever, and holes are
punched there. They are never filled again, because a device may have pinned the old pages: a raised
cap makes new extents. An extent of which nothing is left is retired, and clients unmap it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.model.block import Slot, padded
from kvstore.model.checksum import copy_bytes
from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.system.memory import Memory, read_memory
from kvstore.system.numa import cpus_for_arena
from kvstore.tier.dram.allocator import ExtentAllocator
from kvstore.tier.dram.extent_memory import (
    make_extent,
    make_touched_extent,
    present_nbytes,
    punch,
    refill,
    touch,
)

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0  # at memory that others had taken
GIVE_BACK_STEP_NBYTES = 256 << 20
RENEWED_SHARE = 16  # of the arena, one part at least is renewed at once
SMALL_EXTENTS_MAX = 16  # beyond these, a small extent has to be worth its descriptor
SMALL_SHARE = 16  # of the arena, one part at least is worth a small extent
Run: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class ExtentHandle:
    """What a client needs to map an extent: its id, its memfd (owned by the arena) and its size.

    closed: it was retired, and `fd` is nobody's any more, or another file's.
    """

    id: int
    fd: int
    nbytes: int
    closed: bool = False


@dataclass(slots=True)
class _Extent:
    """withdrawn: runs, as (begin, end), that were given back to the system."""

    handle: ExtentHandle
    mapped: mmap.mmap
    view: memoryview
    space: ExtentAllocator
    withdrawn: list[Run] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What it takes of the system."""
        return self.handle.nbytes - self.space.withdrawn


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
        self._extent_bytes_wanted = extent_bytes
        self._extent_bytes = padded(min(extent_bytes, self.capacity_bytes))
        self._extents: dict[int, _Extent] = {}  # by id, oldest first
        self._next_id = 0
        self._used_nbytes = 0
        self._starved = False  # a record found no run although the cap had room
        self._coming_nbytes = 0  # of the extent that is being made
        self._leaving_nbytes = 0  # withdrawn, and not yet back with the system
        self._callbacks: list[Callable[[ExtentHandle], None]] = []
        self._retired_callbacks: list[Callable[[int], None]] = []
        self._grow_task: asyncio.Task[None] | None = None
        self._cpus: frozenset[int] = frozenset()
        self._memory = memory
        self.waits_for_memory = False
        self.growth_pauses = 0  # ever: how often others had taken the memory

    @property
    def reserved_nbytes(self) -> int:
        """Bytes taken from the system so far; the rest of `capacity_bytes` is still to come."""
        return self._kept_nbytes + self._leaving_nbytes + self._coming_nbytes

    @property
    def _kept_nbytes(self) -> int:
        return sum(extent.nbytes for extent in self._extents.values())

    @property
    def excess_nbytes(self) -> int:
        """Bytes by which a lowered cap is exceeded: see `give_back`."""
        return max(0, self._kept_nbytes - self.capacity_bytes)

    @property
    def physical_nbytes(self) -> int:
        """Bytes of the slots that are taken, in whole pages."""
        return self._used_nbytes

    @property
    def record_nbytes_max(self) -> int:
        """The largest record that fits at all."""
        return min(self._extent_bytes, self.capacity_bytes)

    async def start(self) -> None:
        """Make the first extent, and the others in the background."""
        nbytes = min(self._extent_bytes, self.capacity_bytes)
        self._cpus = await asyncio.to_thread(cpus_for_arena)
        first = self._add(*await asyncio.to_thread(make_extent, nbytes, self._cpus))
        self._touching = asyncio.create_task(asyncio.to_thread(touch, first.mapped))
        self._grow_task = asyncio.create_task(self._grow())

    async def close(self) -> None:
        """Unmap. Views handed out must be gone, or their extent stays mapped until they are."""
        if self._grow_task is not None:
            self._grow_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._grow_task
        for extent in self._extents.values():
            _close(extent)
        self._extents.clear()

    def extents(self) -> list[ExtentHandle]:
        return [extent.handle for extent in self._extents.values()]

    def on_extent(self, callback: Callable[[ExtentHandle], None]) -> Callable[[], None]:
        """Call `callback` for every extent made from now on; returns how to stop that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def on_retired(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback` with the id of every extent that is given back; as `on_extent`."""
        self._retired_callbacks.append(callback)
        return lambda: self._retired_callbacks.remove(callback)

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap. Under a higher one the arena grows in the background; under a lower one
        no slot is handed out beyond it at once, and `give_back` takes what is free."""
        self.capacity_bytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        wanted = padded(min(self._extent_bytes_wanted, self.capacity_bytes))
        self._extent_bytes = max(self._extent_bytes, wanted)
        started = self._grow_task is not None
        if started and not self.growing and self._wanted_nbytes > 0:
            self._grow_task = asyncio.create_task(self._grow())

    async def give_back(self) -> int:
        """Give free memory beyond the cap back to the system, a part of it; returns how much."""
        newest_first = list(reversed(self._extents.values()))  # so whole ones become empty
        return await self._withdraw(newest_first, min(self.excess_nbytes, GIVE_BACK_STEP_NBYTES))

    async def _withdraw(self, extents: Sequence[_Extent], left: int) -> int:
        taken: list[tuple[_Extent, list[Run]]] = []
        for extent in extents:
            if left <= 0:
                break
            runs = extent.space.withdraw(left)
            if runs:
                extent.withdrawn += runs
                taken.append((extent, runs))
                left -= sum(end - begin for begin, end in runs)
        nbytes = sum(end - begin for _, runs in taken for begin, end in runs)
        self._leaving_nbytes += nbytes
        try:
            for extent, runs in taken:
                await self._punch(extent, runs)
        finally:
            self._leaving_nbytes -= nbytes
        for extent, _ in taken:
            if not extent.nbytes:
                self._retire(extent)
        return nbytes

    async def renew(self) -> None:
        """Look after extents with holes, now and then.

        What was given back and is there again, because a client has touched it, is given back once
        more. And where records find no run between the holes that is long enough, what is free
        there gives way to new extents.
        """
        holey = [extent for extent in self._extents.values() if extent.withdrawn]
        for extent in holey:
            if not extent.handle.closed and present_nbytes(extent.handle.fd) > extent.nbytes:
                await self._punch(extent, extent.withdrawn)
        free = sum(extent.nbytes - extent.space.used for extent in holey)
        enough = min(self._extent_bytes, self.capacity_bytes // RENEWED_SHARE)
        if self._starved and free >= enough:
            await self._withdraw(holey, free)
            self.set_capacity(self.capacity_bytes)
        self._starved = False

    async def _punch(self, extent: _Extent, runs: Sequence[Run]) -> None:
        if extent.handle.closed:  # retired meanwhile
            return
        try:  # no descriptor may be left
            fd = os.dup(extent.handle.fd)  # the thread may outlive this arena
            await asyncio.to_thread(punch, fd, tuple(runs))
        except OSError as error:
            logger.warning("arena=not_given_back extent=%d reason=%r", extent.handle.id, str(error))

    def _retire(self, extent: _Extent) -> None:
        if self._extents.pop(extent.handle.id, None) is None:
            return
        for callback in list(self._retired_callbacks):
            callback(extent.handle.id)
        _close(extent)
        logger.info("arena=retired extent=%d bytes=%d", extent.handle.id, extent.handle.nbytes)

    @property
    def growing(self) -> bool:
        return self._grow_task is not None and not self._grow_task.done()

    def punched(self) -> list[tuple[int, int]]:
        """Return extents that lack pages, and how many bytes of each: a client has punched holes
        into them."""
        found = [
            (each.handle.id, each.nbytes - present_nbytes(each.handle.fd))
            for each in self._extents.values()
        ]
        return [(extent, missing) for extent, missing in found if missing > 0]

    async def refill(self, extent: int) -> None:
        """Take the pages that an extent lacks anew: zeros. Raises OSError without memory."""
        punched = self._extents.get(extent)
        if punched is None:  # retired meanwhile
            return
        fd = os.dup(punched.handle.fd)  # the thread may outlive this arena
        kept = _complement(punched.withdrawn, punched.handle.nbytes)
        await asyncio.to_thread(refill, fd, kept)

    def allocate(self, nbytes: int) -> Slot | None:
        """Take a slot of `nbytes` (a multiple of pages is set aside), or return None."""
        if not 1 <= nbytes <= self._extent_bytes:
            raise InvalidRequest(f"a slot of {nbytes} bytes; extents have {self._extent_bytes}")
        if self._used_nbytes + padded(nbytes) > self.capacity_bytes:
            return None
        for number, extent in self._extents.items():
            offset = extent.space.allocate(nbytes)
            if offset is not None:
                self._used_nbytes += padded(nbytes)
                return Slot(number, offset, nbytes)
        self._starved = True
        return None

    def free(self, place: Slot) -> None:
        self._extents[place.extent].space.free(place.offset, place.nbytes)
        self._used_nbytes -= padded(place.nbytes)

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes, writable, valid until the slot is freed."""
        return self._extents[slot.extent].view[slot.offset : slot.offset + slot.nbytes]

    def padded_view(self, slot: Slot) -> memoryview:
        """Return the slot's whole pages: aligned, a multiple of 4 KiB, as O_DIRECT wants them."""
        end = slot.offset + padded(slot.nbytes)
        return self._extents[slot.extent].view[slot.offset : end]

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
        if not self._extents[place.extent].space.holds(place.offset, place.nbytes):
            raise InvalidRequest(f"{place} is not allocated")
        return self.padded_view(place)

    async def _grow(self) -> None:
        await self._touching
        while (nbytes := self._wanted_nbytes) > 0:
            if not await self._may_take(nbytes):
                continue
            self._coming_nbytes = nbytes
            try:
                fd, mapped = await asyncio.to_thread(make_touched_extent, nbytes, self._cpus)
            except ConfigError as error:
                # Less cache is better than no daemon: stay with what could be reserved.
                self.capacity_bytes = self._kept_nbytes
                logger.warning(
                    "arena=short capacity_bytes=%d reason=%r", self.capacity_bytes, str(error)
                )
                return
            finally:
                self._coming_nbytes = 0
            if nbytes > self._wanted_nbytes:  # the cap was lowered meanwhile
                mapped.close()
                os.close(fd)
            else:
                self._add(fd, mapped)
        logger.info(
            "arena=complete extents=%d capacity_bytes=%d", len(self._extents), self.capacity_bytes
        )

    @property
    def _wanted_nbytes(self) -> int:
        """Return the size of the next extent, 0 or less if none is to be made.

        Many small raises of the cap would make many small extents, and each takes a descriptor and
        a mapping of every client. So small raises are summed up before they make an extent.
        """
        kept = self._kept_nbytes
        missing = self.capacity_bytes - kept
        small = sum(each.handle.nbytes < self._extent_bytes for each in self._extents.values())
        if small >= SMALL_EXTENTS_MAX and missing < min(self._extent_bytes, kept // SMALL_SHARE):
            return 0
        return min(self._extent_bytes, missing)

    async def _may_take(self, nbytes: int) -> bool:
        """Say whether an extent may be made without taking its memory from engines. False: after a
        while of waiting.

        The kernel kills somebody when memory runs out, and the arena's next extent is worth less
        than any process of this machine.
        """
        spare = (await asyncio.to_thread(self._memory)).spare_nbytes
        if spare < nbytes:
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
            self.waits_for_memory = self._wanted_nbytes > 0
            return False
        if self.waits_for_memory:
            self.waits_for_memory = False
            logger.info("arena=grows_again spare_bytes=%d", spare)
        return True

    def _add(self, fd: int, mapped: mmap.mmap) -> _Extent:
        handle = ExtentHandle(self._next_id, fd, len(mapped))
        self._next_id += 1
        extent = _Extent(handle, mapped, memoryview(mapped), ExtentAllocator(len(mapped)))
        self._extents[handle.id] = extent
        for callback in list(self._callbacks):
            callback(handle)
        return extent


def _close(extent: _Extent) -> None:
    """Unmap, unless somebody has a view of it: then it stays until that is gone."""
    extent.handle.closed = True
    os.close(extent.handle.fd)
    with contextlib.suppress(BufferError):
        extent.view.release()
        extent.mapped.close()


def _complement(runs: Sequence[Run], end: int) -> list[Run]:
    """Return what of 0 to `end` is in no run."""
    kept: list[Run] = []
    at = 0
    for begin, stop in sorted(runs):
        if at < begin:
            kept.append((at, begin))
        at = stop
    if at < end:
        kept.append((at, end))
    return kept
