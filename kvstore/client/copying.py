"""Copies and checksums of records, by a few threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from kvstore.client.pieces import Memory, Pieces, copy_from_slot, copy_to_slot
from kvstore.model.checksum import checksum, copies_in, copies_out, shared_copies
from kvstore.model.errors import InvalidRequest
from kvstore.system.threads import Threads, ended, outlive

T = TypeVar("T")

COPY_THREADS = 2
COPY_THREADS_MAX = 64
AT_ONCE_NBYTES = 256 << 10  # are copied sooner than a thread is there and the loop awake again
THREAD_NBYTES = 512 << 10  # are worth a thread

Taken = tuple[bytes | Memory | None, bool]
"""A record, None if it is missing or corrupt; whether it is corrupt."""

Copies = Callable[[Sequence[memoryview], Sequence[memoryview]], list[int]]
"""Copies each source to its target, and returns the checksums."""

_Pair = tuple[int, memoryview, memoryview]
"""The number of a record, where it comes from, and where it goes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a get wants. targets: where each record goes, None: into new memory. verify: the copies.
    from_files: records that only the file tier has are read there, and not promoted."""

    targets: Sequence[Memory | None]
    verify: bool = True
    from_files: bool = False

    def __getitem__(self, where: slice) -> Wanted:
        return replace(self, targets=self.targets[where])


class Copiers:
    """The threads of one client."""

    def __init__(self, threads: int = COPY_THREADS) -> None:
        """Raise InvalidRequest for a number that makes no sense."""
        if not 1 <= threads <= COPY_THREADS_MAX:
            raise InvalidRequest(f"copy_threads={threads}: 1 to {COPY_THREADS_MAX} are possible")
        self._count = threads
        self._threads = Threads(threads, thread_name_prefix="kvstore-copy")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fill(
        self, records: Sequence[Memory], slots: Sequence[memoryview | None]
    ) -> list[int]:
        """Copy records into their slots; return the checksums of what was to be written.

        Of the sources, not of the slots: then a stray write into a slot is found by every reader.
        0 where there is no slot.
        """
        found = [0] * len(records)
        plain: list[_Pair] = []
        scattered: list[int] = []
        for at, (record, slot) in enumerate(zip(records, slots, strict=True)):
            if isinstance(record, Pieces):
                scattered += [at] if slot is not None else []
            elif slot is not None:
                plain.append((at, record, slot))
        for (at, *_), each in zip(plain, await self._copied(copies_in, plain), strict=True):
            found[at] = each
        pairs = [[each[at] for at in scattered] for each in (records, slots)]
        for at, each in zip(scattered, await self.map(copy_to_slot, *pairs), strict=True):
            found[at] = each
        return found

    async def take(
        self,
        slots: Sequence[memoryview | None],
        expected: Sequence[int],
        wanted: Wanted,
    ) -> list[Taken]:
        """Copy records out, then verify the copies: what the caller gets is what was checked."""
        taken: list[Taken] = [(None, False)] * len(slots)
        plain: list[_Pair] = []
        others: list[int] = []
        for at, (slot, target) in enumerate(zip(slots, wanted.targets, strict=True)):
            if slot is None:
                continue
            if isinstance(target, memoryview):
                plain.append((at, slot, target))
            else:
                others.append(at)
        sums = await self._copied(copies_out, plain)
        for (at, _, target), found in zip(plain, sums, strict=True):
            corrupt = wanted.verify and found != expected[at]
            taken[at] = (None if corrupt else target, corrupt)
        work = partial(_take, verify=wanted.verify)
        items = [[each[at] for at in others] for each in (slots, expected, wanted.targets)]
        for at, one in zip(others, await self.map(work, *items), strict=True):
            taken[at] = one
        return taken

    async def map(self, work: Callable[..., T], *items: Sequence[Any]) -> list[T]:
        """Return `work` of each record, done by all threads at once."""
        share = max(1, -(-len(items[0]) // self._count))
        shares = [[i[at : at + share] for i in items] for at in range(0, len(items[0]), share)]
        found = await self._done([partial(_each, work, some) for some in shares])
        return [result for some in found for result in some]

    async def _copied(self, copies: Copies, pairs: Sequence[_Pair]) -> list[int]:
        """Copy each source to its target; return the checksums. By one native call of each thread,
        where the library is there."""
        sources, targets = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
        nbytes = sum(map(len, sources))
        if nbytes <= AT_ONCE_NBYTES:
            return copies(sources, targets)
        shared = shared_copies(sources, targets)
        if shared is None:
            return await self.map(partial(_copied, copies), sources, targets)
        threads = min(self._count, -(-nbytes // THREAD_NBYTES))
        await self._done([shared.take_part] * threads)
        return shared.checksums

    async def _done(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of work that threads do. The loop wakes up once. Whatever is raised,
        no thread works any more then."""
        if not works:
            return []
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        left = itertools.count(len(works) - 1, -1)

        def note(_: object = None) -> None:
            if next(left) == 0:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(over.set_result, None)

        jobs: list[Future[T]] = []
        try:
            for work in works:
                jobs.append(self._threads.submit(work))
                jobs[-1].add_done_callback(note)
            await ended([over])
        except BaseException:
            for job in jobs:
                job.cancel()
            for _ in works[len(jobs) :]:  # they will never begin
                note()
            # A thread cannot be stopped; while one still runs, the slots must stay ours.
            await outlive([over])
            raise
        if any(job.cancelled() for job in jobs):
            raise asyncio.CancelledError  # by `close`
        return [job.result() for job in jobs]


def _take(view: memoryview, expected: int, target: Pieces | None, *, verify: bool) -> Taken:
    """Copy a record to pieces, or to new memory."""
    if target is None:
        record = bytes(view)
        corrupt = verify and checksum(record) != expected
        return None if corrupt else record, corrupt
    found = copy_from_slot(view, target)
    corrupt = verify and found != expected
    return None if corrupt else target, corrupt


def _copied(copies: Copies, source: memoryview, target: memoryview) -> int:
    return copies([source], [target])[0]


def _each(work: Callable[..., T], items: Sequence[Sequence[Any]]) -> list[T]:
    return [work(*each) for each in zip(*items, strict=True)]
