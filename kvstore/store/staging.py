"""Memory that a session writes into where it may not write into the arena.

    reserve   slots of the arena, and as many in the session's staging memory, which it is told
    (the client writes there)
    commit    a few threads copy each record into its slot and verify the copy, then it is published

A client may change its staging memory at any time. So what is verified is the copy, which nobody
else can write to, and no other session's memory is ever read for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import SessionId
from kvstore.model.block import PAGE_NBYTES, Slot, padded
from kvstore.model.checksum import copies_out, shared_copies
from kvstore.model.errors import CorruptBlock, InvalidRequest, Unavailable
from kvstore.settings import TenantSettings
from kvstore.store.staging_area import StagingArea
from kvstore.system.threads import Threads, ended, outlive
from kvstore.tier.dram import Arena, ExtentHandle

T = TypeVar("T")

logger = logging.getLogger(__name__)

AREAS_NBYTES_MAX = 16 << 30  # of all sessions; their clients' control groups pay for the pages
AREA_NBYTES_MAX = 256 << 20
AREA_NBYTES_ENOUGH = 64 << 20  # up to here, a session may have half of what is left,
AREA_SHARE = 3  # beyond it, one part of so many
AREA_NBYTES_MIN = 1 << 20  # unless the arena is tiny
SESSIONS_MIN = 4
THREADS = 2
THREAD_NBYTES = 512 << 10  # are worth a thread


def staged_nbytes_max(tenants: Iterable[TenantSettings]) -> int:
    """Return the most that the sessions of all tenants have beside sealed arenas."""
    sealed = (each for each in tenants if each.arena == "sealed")
    return sum(min(AREAS_NBYTES_MAX, each.dram_guaranteed_bytes) for each in sealed)


class _Piece(NamedTuple):
    """Records of one reservation: where they were staged, and where they go."""

    area: StagingArea
    slots: list[Slot]
    targets: list[memoryview]


class Staging:
    """All staging memory of one store. nbytes_max: of all sessions together, as much as the arena
    has."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._areas: dict[SessionId, StagingArea] = {}
        self._without: set[SessionId] = set()  # there was too little left for them
        self._leaving: dict[StagingArea, Future[None] | None] = {}  # None: it is being copied from
        self._staged: dict[int, tuple[SessionId, list[Slot | None]]] = {}  # by lease
        self._threads = Threads(THREADS, thread_name_prefix="kvstore-stage")
        # A client that writes to its file in slow motion holds up this one, and no copies.
        self._giver = Threads(1, thread_name_prefix="kvstore-unstage")
        self.nbytes_max = min(AREAS_NBYTES_MAX, arena.growth.capacity_bytes)

    def close(self) -> None:
        for session in list(self._areas):
            self.end(session)
        self._threads.shutdown(wait=False)
        self._giver.shutdown(wait=False)

    # ---- sessions ------------------------------------------------------------------------------

    def handles(self, session: SessionId) -> list[ExtentHandle]:
        """Return the memory of a session that has a process, made now if it has none. The more
        sessions have some, the less is left for each. One that finds too little has none for its
        life, and can only read in place."""
        if session in self._without:  # its other processes know of none
            return []
        if session not in self._areas:
            nbytes = self._area_nbytes()
            if nbytes < min(AREA_NBYTES_MIN, self.nbytes_max >> SESSIONS_MIN):
                self._without.add(session)
                return []
            self._areas[session] = StagingArea(self._arena.extents.new_id(), nbytes)
        return [self._areas[session].handle]

    def _area_nbytes(self) -> int:
        """Return how much the next session has."""
        for area, job in list(self._leaving.items()):
            if job is not None and job.done():
                del self._leaving[area]
        taken = sum(area.nbytes for area in (*self._areas.values(), *self._leaving))
        left = self.nbytes_max - taken
        wanted = max(left // AREA_SHARE, min(left // 2, AREA_NBYTES_ENOUGH))
        return min(AREA_NBYTES_MAX, wanted) // PAGE_NBYTES * PAGE_NBYTES

    def end(self, session: SessionId) -> None:
        """Let go of a session's memory. What is being copied from it stays until that has ended."""
        self._without.discard(session)
        area = self._areas.pop(session, None)
        if area is None:
            return
        area.handle.closed = True
        self._leaving[area] = None
        if not area.users:
            self._give_back(area)

    def _give_back(self, area: StagingArea) -> None:
        try:
            self._leaving[area] = self._giver.submit(area.give_back)
        except RuntimeError as error:  # no thread may be had, or the daemon ends
            logger.warning("staging=not_given_back bytes=%d reason=%r", area.nbytes, str(error))
            os.close(area.handle.fd)
            del self._leaving[area]

    # ---- reservations --------------------------------------------------------------------------

    def can_take(self, session: SessionId, nbytes: int) -> bool:
        """Say whether a record of so many bytes fits into the session's memory when it is empty."""
        area = self._areas.get(session)
        return area is not None and padded(nbytes) <= area.nbytes

    def place(self, session: SessionId, held: Sequence[HeldSlot | None]) -> list[Slot | None]:
        """Return a slot of the session's memory for each; none where it has no room now. Raises
        Unavailable if it has no memory."""
        area = self._areas.get(session)
        if area is None and not any(held):
            return [None] * len(held)
        if area is None:
            raise self.too_little(session)
        return [None if each is None else area.allocate(each.nbytes) for each in held]

    def too_little(self, session: SessionId) -> Unavailable:
        """Return why a session cannot write."""
        if session in self._areas:
            why = f"a record is larger than its {self._areas[session].nbytes} bytes of memory"
        elif session in self._without:
            why = "it has no memory"
        else:
            return Unavailable("this session has no staging memory: it has not joined the arena")
        return Unavailable(
            f"this session cannot write to a sealed arena: {why}, because many sessions share it",
            reason="sessions",
        )

    def forget(self, session: SessionId, slots: Sequence[Slot | None]) -> None:
        """Take slots back that no lease is noted for."""
        area = self._areas.get(session)
        for slot in slots:
            if area is not None and slot is not None:
                area.free(slot)

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
        if area is None and not any(held):
            return
        if area is None or len(slots) != len(held):
            raise InvalidRequest(f"reservation {lease_id} is being committed already")
        pairs = [
            (slot, self._arena.view(each.slot))
            for slot, each in zip(slots, held, strict=True)
            if slot is not None and each is not None
        ]
        wanted = [each for each, slot in zip(checksums, slots, strict=True) if slot is not None]
        piece = _Piece(area, [slot for slot, _ in pairs], [target for _, target in pairs])
        area.users += 1
        try:
            found = await self._copied(piece)
        finally:
            area.users -= 1
            self.forget(session, slots)
            if area in self._leaving and not area.users:
                self._give_back(area)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one != other:
                raise CorruptBlock(f"record {index} does not match its checksum: put it again")

    async def _copied(self, piece: _Piece) -> list[int]:
        """Copy each record to its target; return the checksums of what has arrived. Threads take
        shares as they come, where the native library is there."""
        sources = [piece.area.view(slot) for slot in piece.slots]
        shared = shared_copies(sources, piece.targets)
        if shared is not None:
            take = partial(_taken, piece, shared.take_part)
            threads = min(THREADS, -(-shared.nbytes // THREAD_NBYTES))
            if any(await self._done([take] * threads)):
                return shared.checksums
        share = max(1, -(-len(sources) // THREADS))
        shares = [slice(at, at + share) for at in range(0, len(sources), share)]
        copy = partial(_share_copied, piece, through_mapping=shared is None)
        found = await self._done([partial(copy, each) for each in shares])
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


def _taken(piece: _Piece, take_part: Callable[[], None]) -> bool:
    """Take part in copies of a piece in a thread, if all of it is there; say whether it is."""
    if not piece.area.is_there(piece.slots):
        return False
    take_part()
    return True


def _share_copied(piece: _Piece, share: slice, *, through_mapping: bool) -> list[int]:
    """Copy some records of a piece in a thread; return the checksums of what has arrived."""
    slots, targets = piece.slots[share], piece.targets[share]
    if through_mapping and piece.area.is_there(slots):
        return copies_out([piece.area.view(slot) for slot in slots], targets)
    return piece.area.read(slots, targets)
