"""Copies and checksums of records, by a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvstore.client.pieces import Memory, copy_from_slot, copy_to_slot
from kvstore.model.checksum import checksum
from kvstore.model.errors import InvalidRequest
from kvstore.system.threads import ended, outlive

T = TypeVar("T")

COPY_THREADS = 2
COPY_THREADS_MAX = 64

Taken = tuple[bytes | Memory | None, bool]
"""A record, None if it is missing or corrupt; whether it is corrupt."""


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
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-copy")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def map(self, work: Callable[..., T], *items: Sequence[Any]) -> list[T]:
        """Return `work` of each record, done by all threads at once."""
        loop = asyncio.get_running_loop()
        share = max(1, -(-len(items[0]) // self._count))
        jobs = [
            loop.run_in_executor(self._threads, _each, work, [i[at : at + share] for i in items])
            for at in range(0, len(items[0]), share)
        ]
        try:
            await ended(jobs)
        except asyncio.CancelledError:
            # A thread cannot be stopped; while one still runs, the slots must stay ours.
            await outlive(jobs)
            raise
        return [result for job in jobs for result in job.result()]


def fill(record: Memory, target: memoryview | None) -> int:
    """Copy a record into its slot and return the checksum of what was to be written.

    Of the source, not of the slot: then a stray write into the slot is found by every reader.
    """
    return 0 if target is None else copy_to_slot(record, target)


def take(view: memoryview | None, expected: int, target: Memory | None, *, verify: bool) -> Taken:
    """Copy a record out, then verify the copy: what the caller gets is what was checked."""
    if view is None:
        return None, False
    if target is None:
        record = bytes(view)
        corrupt = verify and checksum(record) != expected
        return None if corrupt else record, corrupt
    found = copy_from_slot(view, target, verify=verify)
    corrupt = verify and found != expected
    return None if corrupt else target, corrupt


def _each(work: Callable[..., T], items: Sequence[Sequence[Any]]) -> list[T]:
    return [work(*each) for each in zip(*items, strict=True)]
