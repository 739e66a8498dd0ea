"""Records to and from the mapped arena. A few threads copy them while a lease holds their slots.

A window of records takes one reserve (or acquire), one pass over the bytes, one commit (or
release). Records to be promoted, or to be read in files, are taken in pieces, several in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from kvstore.client.batch import WINDOW_KEYS, Batch
from kvstore.client.copying import Copiers, Taken, Wanted
from kvstore.client.file_reads import FileRead, FileReads
from kvstore.client.pieces import Memory
from kvstore.client.session import Session
from kvstore.model.block import Committed, FilePlace, Grant, Slot
from kvstore.system.threads import ended

PIECE_NBYTES = 16 << 20  # of records that are promoted first
FILE_PIECE_NBYTES = (
    64 << 20
)  # of records that may be read in files: fewer calls, and all threads busy
STAGED_PIECE_NBYTES = 16 << 20  # three of them on their way take most of the smallest staging area
PIECES_IN_FLIGHT = 4


class InPlace:
    """Moves records for a client that maps the arena."""

    def __init__(self, session: Session, copiers: Copiers) -> None:
        self._session = session
        self._copiers = copiers
        self._files = FileReads()

    def close(self) -> None:
        self._files.close()

    async def settled(self) -> None:
        """Wait until no read that was given up can write to its target any more."""
        await self._files.settled()

    async def put(
        self, batch: Batch, records: Sequence[Memory], durable: bool, wait_s: float
    ) -> Committed:
        if self._session.staging_nbytes and not durable:
            return await self._put_staged(batch, records, wait_s)
        lease, checksums = await self._written(batch, records, wait_s)
        return await self._session.commit(lease, checksums, durable=durable)

    async def _put_staged(
        self, batch: Batch, records: Sequence[Memory], wait_s: float
    ) -> Committed:
        """Put beside a sealed arena, piece by piece: while one is written, slots for the next are
        reserved, and the daemon copies the one before."""
        done: list[Committed] = []
        pieces = list(batch.windows(STAGED_PIECE_NBYTES))
        reserving = [asyncio.create_task(self._reserve(pieces[0][1], wait_s))]
        committing: list[asyncio.Task[Committed]] = []
        try:
            for number, (where, _) in enumerate(pieces):
                grant = await reserving[0]
                if number + 1 < len(pieces):
                    following = self._reserve(pieces[number + 1][1], wait_s)
                    reserving.append(asyncio.create_task(following))
                reserving.pop(0)
                checksums = await self._filled(grant, records[where])
                try:
                    done += [await each for each in committing]
                except BaseException:
                    await self._session.release(grant.lease_id)
                    raise
                commit = self._session.commit(grant.lease_id, checksums)
                committing = [asyncio.create_task(commit)]
            done += [await each for each in committing]
        finally:
            await self._give_back(reserving)
            await _ended(committing)
        return Committed(
            sum(each.committed for each in done),
            sum(each.existing for each in done),
            sum(each.refused for each in done),
            durable=False,
        )

    async def _give_back(self, reserving: Sequence[asyncio.Task[Grant]]) -> None:
        """Release what was reserved for pieces that are not written any more."""
        for each in reserving:
            if each.done() and not each.cancelled() and each.exception() is None:
                await self._session.release(each.result().lease_id)
        await _ended(reserving)

    async def _written(
        self, batch: Batch, records: Sequence[Memory], wait_s: float
    ) -> tuple[int, list[int]]:
        """Reserve slots and copy records there; return the lease and the checksums."""
        grant = await self._reserve(batch, wait_s)
        return grant.lease_id, await self._filled(grant, records)

    async def _reserve(self, batch: Batch, wait_s: float) -> Grant:
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

    async def take(
        self, batch: Batch, window_nbytes: int, wait_s: float, wanted: Wanted
    ) -> list[Taken]:
        """Take resident records window by window. From the first large window that is not resident
        on, take the rest piece by piece, if there is time to wait: while one is read in files, or
        copied, the next ones are leased or promoted."""
        deadline = time.monotonic() + wait_s
        in_files = wanted.from_files and self._files.usable
        piece_nbytes = FILE_PIECE_NBYTES if in_files else PIECE_NBYTES
        taken: list[Taken] = []
        keys = len(batch.keys)
        for where, window in batch.windows(window_nbytes):
            is_small = window.nbytes <= PIECE_NBYTES and not (in_files and len(window.keys) < keys)
            if wait_s > 0 and not (is_small or await self._is_resident(window)):
                left = slice(where.start, None)
                rest = batch.cut(left)
                taken += await self._take_pieces(
                    rest, piece_nbytes, window_nbytes, deadline, wanted[left]
                )
                break
            taken += await self._leased(window, deadline, wanted[where])
        return taken

    async def _is_resident(self, batch: Batch) -> bool:
        match = await self._session.match(batch.namespace_id, batch.keys)
        return match.resident_blocks == len(batch.keys)

    async def _take_pieces(
        self,
        batch: Batch,
        piece_nbytes: int,
        window_nbytes: int,
        deadline: float,
        wanted: Wanted,
    ) -> list[Taken]:
        """Copy one piece while the next ones are promoted. All in flight together lease no more
        than a window."""
        blocks = max(1, window_nbytes // batch.record_nbytes)
        step = min(piece_nbytes // batch.record_nbytes, blocks // PIECES_IN_FLIGHT, WINDOW_KEYS)
        step = max(1, step)
        pieces = iter([slice(at, at + step) for at in range(0, len(batch.keys), step)])
        taken: list[Taken] = [(None, False)] * len(batch.keys)

        async def take_some() -> None:
            for piece in pieces:
                some = batch.cut(piece)
                taken[piece] = await self._leased(some, deadline, wanted[piece])

        await _together([take_some() for _ in range(min(PIECES_IN_FLIGHT, blocks // step))])
        return taken

    async def _leased(self, batch: Batch, deadline: float, wanted: Wanted) -> list[Taken]:
        """Take records while a lease holds them. If files cannot be read, they are promoted."""
        if wanted.from_files and self._files.usable and time.monotonic() < deadline:
            taken = await self._take_leased(batch, deadline, wanted, in_files=True)
            if self._files.usable or all(record is not None for record, _ in taken):
                return taken
        return await self._take_leased(batch, deadline, wanted, in_files=False)

    async def _take_leased(
        self, batch: Batch, deadline: float, wanted: Wanted, *, in_files: bool
    ) -> list[Taken]:
        """Discard everything if the lease ended early: the slots may have been reused."""
        grant = await self._session.acquire(
            batch.namespace_id,
            batch.keys,
            wait_s=max(0.0, deadline - time.monotonic()),
            spans=batch.spans,
            file_places=in_files,
        )
        held = False
        try:
            taken = await self._take_slots(grant, wanted)
            if grant.places:
                await self._take_files(grant, deadline, wanted, taken)
        finally:
            (held,) = await self._session.release(grant.lease_id)
        return taken if held else [(None, False)] * len(batch.keys)

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


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait for its end."""
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run jobs until all have ended, or one has failed and the others were ended."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await ended(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
