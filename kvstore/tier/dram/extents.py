"""The extents of an arena, from creation to retirement, and callbacks for both."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.system.shared_mapping import SharedMapping
from kvstore.tier.dram.allocator import ExtentAllocator
from kvstore.tier.dram.retired import RetiredExtent, RetiredExtents

logger = logging.getLogger(__name__)
Run: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class ExtentHandle:
    """What a client needs to map an extent: its id, its memfd (owned by the arena) and its size.

    closed: it was retired; `fd` is no longer its own, and may name another file by now.
    """

    id: int
    fd: int
    nbytes: int
    closed: bool = False


@dataclass(slots=True)
class Extent:
    """One memfd and the slots in it.

    withdrawn: runs, as (begin, end), taken out of use for good. leaving: those of them that no
    thread gives back to the system yet. left_nbytes: so much of what was withdrawn the last punch
    left there. lock: held by the thread that changes which pages there are.
    """

    handle: ExtentHandle
    mapped: SharedMapping
    view: memoryview
    space: ExtentAllocator
    withdrawn: list[Run] = field(default_factory=list)
    leaving: list[Run] = field(default_factory=list)
    left_nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes it takes from the system."""
        return self.handle.nbytes - self.space.withdrawn


class Extents:
    """Iterate over it for all extents, oldest first.

    nbytes: all of them take from the system, without leaving_nbytes: bytes withdrawn from use that
    the system does not have back yet. retired: those that were, as far as they are watched.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Extent] = {}
        self.retired = RetiredExtents()
        self.nbytes = 0
        self.leaving_nbytes = 0
        self._next_id = 0
        self._callbacks: list[Callable[[ExtentHandle], None]] = []
        self._retired_callbacks: list[Callable[[int], None]] = []

    def __iter__(self) -> Iterator[Extent]:
        return iter(self.by_id.values())

    def handles(self) -> list[ExtentHandle]:
        return [extent.handle for extent in self]

    def withdraw(self, extent: Extent, nbytes: int) -> int:
        """Take free runs of up to `nbytes` of an extent out of use for good; return their bytes.
        They leave: see `Extent.leaving`."""
        runs = extent.space.withdraw(nbytes)
        extent.withdrawn += runs
        extent.leaving += runs
        taken = sum(end - begin for begin, end in runs)
        self.nbytes -= taken
        self.leaving_nbytes += taken
        return taken

    def on_extent(self, callback: Callable[[ExtentHandle], None]) -> Callable[[], None]:
        """Call `callback` for every extent made from now on; returns how to stop that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def on_retired(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback` with the id of every extent that is given back; as `on_extent`."""
        self._retired_callbacks.append(callback)
        return lambda: self._retired_callbacks.remove(callback)

    def new_id(self) -> int:
        """Return a number that no extent has had; other memory may have it as well."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, fd: int, mapped: SharedMapping) -> Extent:
        """Take over an extent that was made."""
        handle = ExtentHandle(self.new_id(), fd, mapped.nbytes)
        extent = Extent(handle, mapped, mapped.view(), ExtentAllocator(mapped.nbytes))
        self.by_id[handle.id] = extent
        self.nbytes += extent.nbytes
        for callback in list(self._callbacks):
            callback(handle)
        return extent

    def retire(self, extent: Extent) -> None:
        """Unmap an extent of which nothing is left, here and at every client that does as it is
        told. Others are watched."""
        if self.by_id.pop(extent.handle.id, None) is None:
            return
        self.nbytes -= extent.nbytes
        for callback in list(self._retired_callbacks):
            callback(extent.handle.id)
        handle = extent.handle
        _unmap(extent)
        retired = RetiredExtent(
            handle.id, handle.fd, handle.nbytes, extent.lock, extent.left_nbytes
        )
        self.retired.add(retired)
        logger.info("arena=retired extent=%d bytes=%d", handle.id, handle.nbytes)

    def close(self) -> None:
        """Unmap all. Clients are not told: the daemon ends."""
        for extent in self:
            _unmap(extent)
            os.close(extent.handle.fd)
        self.by_id.clear()
        self.nbytes = 0
        self.retired.close()


def _unmap(extent: Extent) -> None:
    """Unmap. While a view of it exists, the mapping stays until the view is released."""
    extent.handle.closed = True
    with contextlib.suppress(BufferError):
        extent.view.release()
        extent.mapped.close()
