"""What was written, and whether it is durable: files created, synced, and their directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from kvstore.tier.file.calls import Calls
from kvstore.tier.file.failure import DiskFailed
from kvstore.tier.file.segment import FileExtent, Segment
from kvstore.tier.file.segment_file import SegmentFiles
from kvstore.tier.file.space import Space
from kvstore.tier.file.threads import Run, all_or_raise
from kvstore.tier.file.upkeep import Upkeep


class Durability:
    """Syncs the segments of one directory, and the directory when it has new files."""

    def __init__(
        self, space: Space, files: SegmentFiles, upkeep: Upkeep, calls: Calls, run: Run
    ) -> None:
        self._space = space
        self._files = files
        self._upkeep = upkeep
        self._calls = calls
        self._run = run
        self._created = 0
        self._created_synced = 0

    async def opened(self, segment: Segment) -> int:
        """Return a descriptor to write to `segment`; its file is created for the first frame."""
        async with segment.busy:
            if segment.fd is not None:
                return segment.fd
            making = partial(_make, self._files, segment)
            try:
                return await self._run(making)
            finally:
                self._created += segment.fd is not None

    async def sync(self, extents: Sequence[FileExtent] = ()) -> None:
        """Make every write that has returned durable.

        Raises DiskFailed: then none of the writes since the last success may be durable, now or
        ever (the kernel drops what it could not write): free these frames or write them elsewhere.
        Their segment takes no more frames and gets no footer, so the next start verifies it.

        extents: the frames that matter to the caller. A sync that another caller started may have
        met the failure; it is raised here only for frames that are named.
        """
        with self._calls.one():
            created = self._created
            dirty = [s for s in self._space.segments if s.writes_synced < s.writes]
            jobs = [self._sync_segment(segment, segment.sync_failures) for segment in dirty]
            if self._created_synced < created:
                jobs.append(self._sync_directory(created))
            outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        all_or_raise(outcomes)
        if any(self._space.is_lost(extent) for extent in extents):
            raise DiskFailed("an fdatasync failed before")

    async def sync_new_files(self) -> None:
        """Make the names of files durable that were created since the last sync."""
        if self._created_synced < self._created:
            await self._sync_directory(self._created)

    async def _sync_segment(self, segment: Segment, failures: int) -> None:
        try:
            async with segment.busy:
                await self._upkeep.sync(segment)
            lost = segment.sync_failures > failures
        finally:
            self._upkeep.start()
        if lost:
            raise DiskFailed("an fdatasync failed meanwhile")

    async def _sync_directory(self, created: int) -> None:
        await self._run(self._files.sync_directory)
        self._created_synced = max(self._created_synced, created)


def _make(files: SegmentFiles, segment: Segment) -> int:
    """Make the file of `segment`, in a thread, and note it there: a caller that is cancelled gets
    no result, and the next one must find the file."""
    fd, segment.key = files.create(segment.tag)
    segment.fd = fd
    return fd
