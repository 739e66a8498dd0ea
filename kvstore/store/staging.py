"""Memory that a session writes into where it may not write into the arena.

    reserve   slots of the arena, and as many in the session's staging memory, which it is told
    (the client writes there)
    commit    a few threads copy each record into its slot and verify the copy, then it is published

A client may change its staging memory at any time. So what is verified is the copy, which nobody
else can write to, and no other session's memory is ever read for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import SessionId
from kvstore.model.block import Slot, padded
from kvstore.model.checksum import copies_out, shared_copies
from kvstore.model.errors import ConfigError, CorruptBlock, InvalidRequest, Unavailable
from kvstore.system.shared_mapping import SharedMapping
from kvstore.system.threads import Threads, ended, outlive
from kvstore.tier.dram import Arena, ExtentHandle
from kvstore.tier.dram.allocator import ExtentAllocator

T = TypeVar("T")

logger = logging.getLogger(__name__)

AREA_NBYTES_MIN = 64 << 20
AREA_NBYTES_MAX = 256 << 20
AREA_SHARE = 3  # of the arena, one part is staging memory of one session
AREAS_NBYTES_MAX = 16 << 30  # of all sessions; their clients' control groups pay for the pages
THREADS = 2
THREAD_NBYTES = 512 << 10  # are worth a thread
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True)
class _Area:
    """The staging memory of one session. Its pages exist once its client has written to them."""

    handle: ExtentHandle
    view: memoryview
    space: ExtentAllocator


class Staging:
    """All staging memory of one store."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._areas: dict[SessionId, _Area] = {}
        self._staged: dict[int, tuple[SessionId, list[Slot | None]]] = {}  # by lease
        self._threads = Threads(THREADS, thread_name_prefix="kvstore-stage")
        share = padded(arena.growth.capacity_bytes // AREA_SHARE)
        self.area_nbytes = max(AREA_NBYTES_MIN, min(AREA_NBYTES_MAX, share))

    def close(self) -> None:
        for session in list(self._areas):
            self.end(session)
        self._threads.shutdown(wait=False)

    # ---- sessions ------------------------------------------------------------------------------

    def handles(self, session: SessionId) -> list[ExtentHandle]:
        """Return the memory of a session that has a process, made now if it has none. Raises
        Unavailable."""
        if session not in self._areas:
            if (len(self._areas) + 1) * self.area_nbytes > AREAS_NBYTES_MAX:
                raise Unavailable("too many sessions write to a sealed arena", reason="sessions")
            self._areas[session] = self._make()
        return [self._areas[session].handle]

    def end(self, session: SessionId) -> None:
        """Let go of a session's memory. What is being copied from it stays until that has ended."""
        area = self._areas.pop(session, None)
        if area is None:
            return
        area.handle.closed = True
        os.close(area.handle.fd)  # the mapping goes with the last view of it

    # ---- reservations --------------------------------------------------------------------------

    def place(self, session: SessionId, held: Sequence[HeldSlot | None]) -> list[Slot | None]:
        """Return a slot of the session's memory for each; none where it has no room now."""
        area = self._areas.get(session)
        if area is None:
            raise Unavailable("this session has no staging memory: it has not joined the arena")
        return [None if each is None else _allocate(area, each.nbytes) for each in held]

    def forget(self, session: SessionId, slots: Sequence[Slot | None]) -> None:
        """Take slots back that no lease is noted for."""
        area = self._areas.get(session)
        for slot in slots:
            if area is not None and slot is not None:
                area.space.free(slot.offset, slot.nbytes)

    def note(self, lease_id: int, session: SessionId, slots: list[Slot | None]) -> None:
        """Note which slots stand for those of a reservation, until `over`."""
        self._staged[lease_id] = (session, slots)

    def over(self, lease_id: int) -> None:
        """Note that a lease has ended."""
        if (staged := self._staged.pop(lease_id, None)) is not None:
            self.forget(*staged)

    async def copy(
        self, lease_id: int, held: Sequence[HeldSlot | None], checksums: Sequence[int]
    ) -> None:
        """Copy what was staged for a reservation into its slots, which the caller has pinned.

        Raises CorruptBlock for a record that is not what its checksum says, InvalidRequest if the
        reservation is being committed already. Returns when no thread touches the slots any more.
        """
        session, slots = self._staged.pop(lease_id, (SessionId(0), []))
        area = self._areas.get(session)
        if area is None or len(slots) != len(held):
            raise InvalidRequest(f"reservation {lease_id} is being committed already")
        pairs = [
            (_view(area, slot), self._arena.view(each.slot))
            for slot, each in zip(slots, held, strict=True)
            if slot is not None and each is not None
        ]
        wanted = [each for each, slot in zip(checksums, slots, strict=True) if slot is not None]
        try:
            found = await self._copied(pairs)
        finally:
            self.forget(session, slots)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one != other:
                raise CorruptBlock(f"record {index} does not match its checksum: put it again")

    async def _copied(self, pairs: Sequence[tuple[memoryview, memoryview]]) -> list[int]:
        """Copy each source to its target; return the checksums of what has arrived. Threads take
        shares as they come, where the native library is there."""
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        shared = shared_copies(sources, targets)
        if shared is not None:
            threads = min(THREADS, -(-shared.nbytes // THREAD_NBYTES))
            await self._done([shared.take_part] * threads)
            return shared.checksums
        share = max(1, -(-len(pairs) // THREADS))
        shares = [slice(at, at + share) for at in range(0, len(pairs), share)]
        found = await self._done([partial(copies_out, sources[at], targets[at]) for at in shares])
        return [each for some in found for each in some]

    async def _done(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of work that threads do. Whatever is raised, none works then."""
        loop = asyncio.get_running_loop()
        jobs: list[asyncio.Future[T]] = []
        try:
            for work in works:
                jobs.append(loop.run_in_executor(self._threads, work))
            await ended(jobs)
        except BaseException:
            await outlive(jobs)
            raise
        return [job.result() for job in jobs]

    def _make(self) -> _Area:
        fd = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)  # others could open it anew through /proc
            os.ftruncate(fd, self.area_nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            view = SharedMapping(fd, self.area_nbytes).view()
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"no staging memory: {error.strerror}") from error
        handle = ExtentHandle(self._arena.extents.new_id(), fd, self.area_nbytes)
        return _Area(handle, view, ExtentAllocator(self.area_nbytes))


def _allocate(area: _Area, nbytes: int) -> Slot | None:
    offset = area.space.allocate(nbytes)
    return None if offset is None else Slot(area.handle.id, offset, nbytes)


def _view(area: _Area, slot: Slot) -> memoryview:
    return area.view[slot.offset : slot.offset + slot.nbytes]
