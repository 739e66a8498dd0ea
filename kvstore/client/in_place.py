"""Records to and from the mapped arena. A few threads copy them while a lease holds their slots.

A window of records is put with one reserve, one pass over the bytes, and one commit. Records are
taken, and put beside a sealed arena, in pieces: each has these three calls of its own, and several
are in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from kvstore.client.batch import Batch
from kvstore.client.copying import Copiers, Taken, Wanted
from kvstore.client.file_reads import FileRead, FileReads
from kvstore.client.lookup_lease import KEEP_S, Lookup, LookupLease, leading
from kvstore.client.pieces import Memory
from kvstore.client.session import Session
from kvstore.model.block import Committed, FilePlace, Grant, Slot
from kvstore.model.errors import Incompatible
from kvstore.system.patience import Patience
from kvstore.system.threads import outlive

logger = logging.getLogger(__name__)

PIECE_NBYTES = 16 << 20  # of records that are promoted first
LARGE_PIECE_NBYTES = 64 << 20  # of those that are read in files: fewer calls
STAGED_PIECE_NBYTES = 64 << 20  # each costs a reserve and a commit, which copies of it outweigh
STAGED_SHARE = 3 / 8  # of what may be written into: two pieces on their way take most of it
PIECES_IN_FLIGHT = 4
RELEASES_MAX = 16  # whose answers nobody waits for


class InPlace:
    """Moves records for a client that maps the arena."""

    def __init__(self, session: Session, copiers: Copiers) -> None:
        self._session = session
        self._copiers = copiers
        self._files = FileReads()
        self._releases: set[asyncio.Task[list[bool]]] = set()

    def close(self) -> None:
        self._files.close()
        for release in self._releases:
            release.cancel()

    async def settled(self) -> None:
        """Wait until no read that was given up can write to its target any more."""
        await self._files.settled()

    async def put(
        self, batch: Batch, records: Sequence[Memory], durable: bool, patience: Patience
    ) -> Committed:
        if self._session.staging_nbytes and not durable:
            return await self._put_staged(batch, records, patience)
        lease, checksums = await self._written(batch, records, patience)
        return await self._session.commit(lease, checksums, durable=durable)

    async def _put_staged(
        self, batch: Batch, records: Sequence[Memory], patience: Patience
    ) -> Committed:
        """Put beside a sealed arena, piece by piece: while one is written, the daemon copies the
        one before. Two are on their way at most: the next is reserved when the first is over."""
        done: list[Committed] = []
        pieces = list(batch.windows(self._staged_nbytes(batch)))
        reserving: list[asyncio.Task[Grant]] = []
        committing: dict[int, asyncio.Task[Committed]] = {}  # by lease

        def reserve(number: int) -> None:
            if number < len(pieces):
                reserving.append(asyncio.create_task(self._reserve(pieces[number][1], patience)))

        reserve(0)
        try:
            for number, (where, _) in enumerate(pieces):
                grant = await reserving[0]
                if not number:
                    reserve(1)
                reserving.pop(0)
                checksums = await self._filled(grant, records[where])
                try:
                    done += [await each for each in committing.values()]
                except BaseException:
                    await self._session.release(grant.lease_id)
                    raise
                commit = self._session.commit(grant.lease_id, checksums)
                committing = {grant.lease_id: asyncio.create_task(commit)}
                if number:
                    reserve(number + 1)
            done += [await each for each in committing.values()]
        finally:
            await self._give_up(reserving, committing)
        return Committed(
            sum(each.committed for each in done),
            sum(each.existing for each in done),
            sum(each.refused for each in done),
            durable=False,
        )

    def _staged_nbytes(self, batch: Batch) -> int:
        """Return how much a piece has at most. All have about as much: a short one costs as many
        calls."""
        most = min(STAGED_PIECE_NBYTES, int(STAGED_SHARE * self._session.staging_nbytes))
        step = max(1, most // batch.record_nbytes)
        count = -(-len(batch.keys) // step)
        return -(-len(batch.keys) // count) * batch.record_nbytes

    async def _give_up(
        self,
        reserving: Sequence[asyncio.Task[Grant]],
        committing: Mapping[int, asyncio.Task[Committed]],
    ) -> None:
        """End what is under way for pieces that are not put any more, and release their slots."""
        tasks: list[asyncio.Task[Any]] = [*reserving, *committing.values()]
        for each in tasks:
            each.cancel()
        await outlive(tasks)
        leases = [each.result().lease_id for each in reserving if not _failed(each)]
        leases += [lease for lease, each in committing.items() if _failed(each)]
        if leases:
            await self._release_later(*leases)

    async def _written(
        self, batch: Batch, records: Sequence[Memory], patience: Patience
    ) -> tuple[int, list[int]]:
        """Reserve slots and copy records there; return the lease and the checksums."""
        grant = await self._reserve(batch, patience)
        return grant.lease_id, await self._filled(grant, records)

    async def _reserve(self, batch: Batch, patience: Patience) -> Grant:
        with patience.waiting() as wait_s:
            return await self._session.reserve(
                batch.namespace_id,
                batch.keys,
                first_block=batch.first_block,
                parent=batch.parent,
                spans=batch.spans,
                wait_s=wait_s,
                sizes=batch.sizes,
                tokens=batch.tokens,
            )

    async def _filled(self, grant: Grant, records: Sequence[Memory]) -> list[int]:
        """Copy records into their slots; return the checksums. They are released if it fails."""
        try:
            targets = [self._session.view(slot) if slot else None for slot in grant.slots]
            return await self._copiers.fill(records, targets)
        except BaseException:
            await self._session.release(grant.lease_id)
            raise

    async def look_up(self, batch: Batch, *, from_files: bool) -> Lookup:
        """Say which records are stored, and lease those that are here now, from the first on."""
        grant = await self._session.acquire(
            batch.namespace_id,
            batch.keys,
            spans=batch.spans,
            file_places=from_files and self._files.usable,
            each=True,
        )
        if len(grant.present) != len(batch.keys):
            if grant.leased:
                await self._release_later(grant.lease_id)
            raise Incompatible("the daemon does not say which records are stored")
        places = grant.places or (None,) * len(grant.slots)
        count = leading([any(each) for each in zip(grant.slots, places, strict=True)])
        if not count:
            if grant.leased:
                await self._release_later(grant.lease_id)
            return Lookup(list(grant.present), None)
        lease = LookupLease(
            batch.namespace_id,
            batch.part,
            batch.keys,
            grant,
            self._session.instance,
            time.monotonic() + min(KEEP_S, grant.deadline_s / 2),
            batch.nbytes,
        )
        return Lookup(list(grant.present), lease.first(count))

    async def give_back(self, lease: LookupLease) -> None:
        await self._release_later(lease.grant.lease_id)

    async def take(
        self,
        batch: Batch,
        window_nbytes: int,
        wait_s: float,
        wanted: Wanted,
        lease: LookupLease | None = None,
    ) -> list[Taken]:
        """Take records piece by piece, those that `lease` has as one. It ends."""
        deadline = time.monotonic() + wait_s
        taken: list[Taken] = [(None, False)] * len(batch.keys)
        count = self._usable_records(lease, batch, wanted)

        async def take_leased(lease: LookupLease) -> None:
            if count:
                some, grant = slice(count), lease.first(count).grant
                taken[some] = await self._leased(batch.cut(some), deadline, wanted[some], grant)
            else:
                await self.give_back(lease)

        async def take_others() -> None:
            others = slice(count, None)
            taken[others] = await self._take_pieces(
                batch.cut(others), window_nbytes, deadline, wanted[others]
            )

        jobs = [] if lease is None else [take_leased(lease)]
        if count < len(batch.keys):
            jobs.append(take_others())
        if len(jobs) == 1:
            await jobs[0]
        elif jobs:
            await _together(jobs)
        return taken

    def _usable_records(self, lease: LookupLease | None, batch: Batch, wanted: Wanted) -> int:
        """Return how many records of a batch may be taken by a lease."""
        if lease is None or not lease.is_good(self._session.instance):
            return 0
        if any(lease.grant.places) and not self._reads_files(wanted):
            return 0
        return lease.covers(batch.namespace_id, batch.part, batch.keys)

    async def _take_pieces(
        self, batch: Batch, window_nbytes: int, deadline: float, wanted: Wanted
    ) -> list[Taken]:
        """Take records piece by piece: while one is copied, or read in files, the next ones are
        leased or promoted. All in flight together lease no more than a window."""
        is_late = time.monotonic() >= deadline
        if self._reads_files(wanted):
            most = min(LARGE_PIECE_NBYTES, window_nbytes // 2)
        elif batch.nbytes <= PIECE_NBYTES or is_late or await self._is_resident(batch):
            most = window_nbytes // 2  # nothing to wait for but copies
        else:
            most = min(PIECE_NBYTES, window_nbytes // PIECES_IN_FLIGHT)
        step = max(1, min(most // batch.record_nbytes, batch.keys_max))
        pieces = iter([slice(at, at + step) for at in range(0, len(batch.keys), step)])
        taken: list[Taken] = [(None, False)] * len(batch.keys)

        async def take_some() -> None:
            for piece in pieces:
                taken[piece] = await self._leased(batch.cut(piece), deadline, wanted[piece])

        in_flight = max(1, min(PIECES_IN_FLIGHT, window_nbytes // (step * batch.record_nbytes)))
        await _together([take_some() for _ in range(in_flight)])
        return taken

    def _reads_files(self, wanted: Wanted) -> bool:
        return wanted.from_files and self._files.usable

    async def _is_resident(self, batch: Batch) -> bool:
        for at in range(0, len(batch.keys), batch.keys_max):
            keys = batch.keys[at : at + batch.keys_max]
            match = await self._session.match(batch.namespace_id, keys)
            if match.resident_blocks < len(keys):
                return False
        return True

    async def _leased(
        self, batch: Batch, deadline: float, wanted: Wanted, grant: Grant | None = None
    ) -> list[Taken]:
        """Take records while a lease holds them: `grant`, or one of now. If files cannot be read,
        they are promoted."""
        if grant is None and self._reads_files(wanted) and time.monotonic() < deadline:
            grant = await self._acquire(batch, deadline, in_files=True)
        if grant is not None:
            taken = await self._take_leased(grant, deadline, wanted)
            if self._files.usable or all(record is not None for record, _ in taken):
                return taken
        grant = await self._acquire(batch, deadline, in_files=False)
        return await self._take_leased(grant, deadline, wanted)

    async def _acquire(self, batch: Batch, deadline: float, *, in_files: bool) -> Grant:
        return await self._session.acquire(
            batch.namespace_id,
            batch.keys,
            wait_s=max(0.0, deadline - time.monotonic()),
            spans=batch.spans,
            file_places=in_files,
        )

    async def _take_leased(self, grant: Grant, deadline: float, wanted: Wanted) -> list[Taken]:
        """Discard everything if the lease ended early: the slots may have been reused.

        Copies that were verified are what was put, whatever became of the lease.
        """
        is_sure = False
        try:
            taken = await self._take_slots(grant, wanted)
            if grant.places:
                await self._take_files(grant, deadline, wanted, taken)
            is_sure = wanted.verify and not any(corrupt for _, corrupt in taken)
        finally:
            if not is_sure:
                (held,) = await self._session.release(grant.lease_id)
        if is_sure:
            await self._release_later(grant.lease_id)
            return taken
        return taken if held else [(None, False)] * len(grant.slots)

    async def _release_later(self, *lease_ids: int) -> None:
        """Send a release, before whatever the caller sends next, and do not wait for its answer."""
        release = asyncio.create_task(self._session.release(*lease_ids))
        self._releases.add(release)
        release.add_done_callback(self._released)
        if len(self._releases) <= RELEASES_MAX:
            await asyncio.sleep(0)
        else:
            await asyncio.wait(self._releases, return_when=asyncio.FIRST_COMPLETED)

    def _released(self, release: asyncio.Task[list[bool]]) -> None:
        self._releases.discard(release)
        if not release.cancelled() and (error := release.exception()) is not None:
            logger.info("release=failed reason=%r", str(error))  # the session sends it later

    async def _take_slots(self, grant: Grant, wanted: Wanted) -> list[Taken]:
        if not any(grant.slots):
            return [(None, False)] * len(grant.slots)
        views = [
            self._session.view(slot) if slot is not None and _fits(slot, target) else None
            for slot, target in zip(grant.slots, wanted.targets, strict=True)
        ]
        return await self._copiers.take(views, grant.checksums, wanted)

    async def _take_files(
        self, grant: Grant, deadline: float, wanted: Wanted, taken: list[Taken]
    ) -> None:
        """Fill in the records of `taken` that have places in files."""
        reads = {
            index: FileRead(place, expected if wanted.verify else None, target)
            for index, (place, expected, target) in enumerate(
                zip(grant.places, grant.checksums, wanted.targets, strict=True)
            )
            if place is not None and isinstance(target, memoryview) and _fits(place, target)
        }
        good = await self._files.read(list(reads.values()), deadline)
        for (index, read), is_good in zip(reads.items(), good, strict=True):
            taken[index] = (read.target if is_good else None, False)


def _fits(record: Slot | FilePlace, target: Memory | None) -> bool:
    """Say whether a record is as long as where it goes: of records that vary, another one is no
    part of what was asked for."""
    return target is None or record.nbytes == len(target)


def _failed(task: asyncio.Task[Any]) -> bool:
    """Say whether a task that has ended has no result."""
    return task.cancelled() or task.exception() is not None


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run jobs until all have ended, or one has failed and the others were ended."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await outlive(tasks)  # a thread of theirs may still write to the caller's memory
        errors = [task.exception() for task in tasks if not task.cancelled()]
    for error in errors:
        if error is not None:
            raise error
