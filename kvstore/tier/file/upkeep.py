"""Background work of one directory: unlink dead segments, punch holes, write footers.

A failure costs space or a slower restart, never a frame. It is logged and not repeated before the
next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from kvstore.format.frame import NO_SEQUENCE
from kvstore.tier.file.failure import DiskFailed, DiskFull
from kvstore.tier.file.segment import Phase, Segment
from kvstore.tier.file.segment_file import SegmentFiles
from kvstore.tier.file.space import Space
from kvstore.tier.file.threads import Run

_log = logging.getLogger(__name__)


class Upkeep:
    """One task that does one piece of work at a time. punches: the file system can."""

    def __init__(self, space: Space, files: SegmentFiles, run: Run) -> None:
        self.punches = True
        self._space = space
        self._files = files
        self._run = run
        self._given_up: set[Segment] = set()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin with the work that is due. Call it on the event loop."""
        running = self._task is not None and not self._task.done()
        if not running and not self._stopped and self._next() is not None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def settle(self) -> None:
        """Wait until footers, holes and unlinks that are due now are done."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """Begin with nothing more. The piece under way ends when its thread does: see `settle`."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while (work := self._next()) is not None:
            await work()

    def _next(self) -> Callable[[], Awaitable[None]] | None:
        """Return the next piece that is due. Dead segments first: they need nothing else."""
        dead = [s for s in self._space.segments.unlinkable() if s not in self._given_up]
        if dead:
            return partial(self._unlink, dead)
        for segment in self._space.segments:
            if segment.holes:
                return partial(self._punch, segment)
        for segment in self._space.segments.sealable():
            return partial(self._seal, segment)
        for segment in self._space.segments:
            if self._is_hollow(segment):
                return partial(self._forget_runs, segment)
        return None

    async def _unlink(self, segments: list[Segment]) -> None:
        """Remove files, in one step with their directory's sync.

        A tombstone may be needed only until another of these files is gone. Its segment is not
        among `segments`: it is removed after that file is durably gone.
        """
        for segment in segments:
            await self._close_file(segment)
            segment.writes_synced = segment.writes  # the bytes of dead frames need no sync
        try:
            await self._run(partial(self._files.unlink, [segment.tag for segment in segments]))
        except (DiskFull, DiskFailed) as error:
            _log.warning("dead segments stay until a restart: %s", error)
            self._given_up.update(segments)
            return
        for segment in segments:
            self._space.remove(segment)

    async def _punch(self, segment: Segment) -> None:
        holes = self._space.take_holes(segment)
        try:
            if self.punches:
                self.punches = await self._run(partial(self._files.punch, segment.tag, holes))
            measured = await self._run(partial(self._files.measure, segment.tag))
            self._space.measured(segment, measured)
        except (DiskFull, DiskFailed) as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # never created: nothing to do
                _log.warning("freed space is not given back to the disk: %s", error)
                self._given_up.add(segment)
        finally:
            self._space.punched(segment, holes)

    async def sync(self, segment: Segment) -> None:
        """Make what was written durable; the caller holds `segment.busy`. Raises DiskFailed."""
        writes = segment.writes
        if segment.writes_synced >= writes:
            return
        try:
            await self._cover(segment, writes)
        except (DiskFull, DiskFailed):
            segment.writes_synced = writes  # reported, once
            raise

    async def _cover(self, segment: Segment, writes: int) -> None:
        """Call fdatasync, unless one has failed.

        After a failure the kernel may have dropped the pages, and a second fdatasync would wrongly
        succeed. The segment is retired, and the failure is counted for every caller that waits, and
        for later ones if this one is cancelled.
        """
        try:
            if segment.fd is None or segment.sync_failures:
                segment.sync_failures += 1
                raise DiskFailed("an earlier fdatasync failed")
            await self._run(partial(_sync, self._files, segment, segment.fd))
        finally:
            if segment.sync_failures:
                self._space.segments.retire(segment)
        segment.writes_synced = segment.writes_durable = writes

    async def _seal(self, segment: Segment) -> None:
        try:
            async with segment.busy:
                await self._append_footer(segment)
        except (DiskFull, DiskFailed) as error:
            _log.warning("no footer, the next start scans this segment: %s", error)
        await self._close_file(segment)
        self._space.segments.closed(segment)
        await self._measure(segment)

    async def _append_footer(self, segment: Segment) -> None:
        if segment.writes_synced < segment.writes:
            await self._cover(segment, segment.writes)
        if segment.sync_failures:
            return
        headers = segment.packed_headers
        seal = partial(self._files.seal, segment.tag, segment.end, headers)
        await self._run(partial(seal, segment.run_sequence_min, segment.key))

    async def _measure(self, segment: Segment) -> None:
        try:
            measured = await self._run(partial(self._files.measure, segment.tag))
            self._space.measured(segment, measured)
        except (DiskFull, DiskFailed) as error:
            _log.warning("a segment is counted at its last size: %s", error)

    def _is_hollow(self, segment: Segment) -> bool:
        return (
            self.punches
            and segment.phase is Phase.CLOSED
            and segment.runs == 0
            and segment.run_sequence_min != NO_SEQUENCE
            and segment not in self._given_up
        )

    async def _forget_runs(self, segment: Segment) -> None:
        """Make the holes of a segment that is only kept for its tombstones durable.

        Its runs can then not be found again, so no other segment must keep a tombstone for them.
        """
        try:
            await self._run(partial(self._files.sync_closed, segment.tag))
            segment.run_sequence_min = NO_SEQUENCE
        except (DiskFull, DiskFailed) as error:
            _log.warning("tombstones are kept longer: %s", error)
            self._given_up.add(segment)

    async def _close_file(self, segment: Segment) -> None:
        async with segment.busy:
            if segment.fd is not None:
                await self._run(partial(_close, self._files, segment, segment.fd))


def _sync(files: SegmentFiles, segment: Segment, fd: int) -> None:
    """Call fdatasync, in a thread, and note a failure there: a caller that is cancelled does not
    hear of it."""
    try:
        files.sync(fd)
    except BaseException:
        segment.sync_failures += 1
        raise


def _close(files: SegmentFiles, segment: Segment, fd: int) -> None:
    """Close the file, in a thread: a work that is cancelled before it begins leaves it open."""
    segment.fd = None
    files.disk.close(fd)
