"""One directory of frames: bookkeeping on the event loop, blocking I/O in the tier's own threads.

`FileTier` opens, recovers and closes it; its parts can be read alone:

    frames      the life of a frame: allocate, write, read, free    (frames.py)
    durability  sync of files and of the directory                  (durability.py)
    recall      the runs that a start found on disk                 (recall.py)
    space       the room under the cap, the segments, the holes     (space.py, segments.py)
    upkeep      footers, holes and unlinks, in the background       (upkeep.py)
    health      whether the directory can be used, and its suspects (health.py)

Below them, `segment_file.py` does the I/O of one file, `recovery.py` reads files back and
`directory.py` takes a directory into use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.format.frame import SegmentTag
from kvstore.model.errors import Unavailable
from kvstore.sealing import Sealing
from kvstore.system.threads import Threads, outlive
from kvstore.tier.file.calls import Calls
from kvstore.tier.file.directory import Directory, take_directory
from kvstore.tier.file.disk import Disk, RealDisk
from kvstore.tier.file.durability import Durability
from kvstore.tier.file.failure import DiskUnreadable
from kvstore.tier.file.found import Found
from kvstore.tier.file.frames import Frames
from kvstore.tier.file.health import Health
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.recall import Recall
from kvstore.tier.file.recovery import LoadedSegment, adopted, holds_sealed, load_segment
from kvstore.tier.file.segment import FramePlace, Segment
from kvstore.tier.file.segment_file import SegmentFiles, parse_segment_name, segment_name
from kvstore.tier.file.space import Space
from kvstore.tier.file.threads import Run, all_or_raise, run_blocking
from kvstore.tier.file.upkeep import Upkeep

SEGMENT_NBYTES = 256 << 20
CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `open` found: how many runs, and where numbering goes on.

    dropped_frames: torn or rotten, found in scans. Rot in sealed segments shows on a read.
    """

    runs: int
    next_sequence: int
    dropped_frames: int
    scan_s: float


class FileTier:
    """Frames in the segments of one directory.

    capacity_bytes: cap of the segments' physical bytes. segment_nbytes: a segment is sealed when
    its next frame would end beyond this. direct: use O_DIRECT where the file system has it; buffers
    are then page-aligned. threads: I/O in flight at most; executor: runs it instead of own threads.
    free_bytes_min: of the file system, left to others as `Health.measure_free` finds it. sealing:
    encrypts what is written, and opens what was; keys: then those of the directory.

    run: runs blocking work in the tier's threads. No call has a deadline of its own: a disk may
    hang for as long as it likes.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        segment_nbytes: int = SEGMENT_NBYTES,
        direct: bool = True,
        threads: int = 8,
        free_bytes_min: int = 0,
        disk: Disk | None = None,
        executor: Executor | None = None,
        sealing: Sealing | None = None,
    ) -> None:
        self.threads = threads
        self._path = path
        self._disk: Disk = disk if disk is not None else RealDisk()
        self._executor = executor or Threads(threads, thread_name_prefix="kvstore-file")
        self.run: Run = partial(run_blocking, self._executor)
        self._directory: Directory | None = None
        self._closing: asyncio.Future[None] | None = None
        calls = self._calls = Calls()
        self.keys = DirectoryKeys(self._disk, path, sealing) if sealing is not None else None
        files = self._files = SegmentFiles(self._disk, path, direct=direct, keys=self.keys)
        space = self.space = Space(capacity_bytes, segment_nbytes)
        upkeep = self.upkeep = Upkeep(space, files, self.run)
        self.durability = Durability(space, files, upkeep, calls, self.run)
        self.frames = Frames(
            space,
            files,
            durability=self.durability,
            upkeep=upkeep,
            calls=calls,
            executor=self._executor,
        )
        self.recall = Recall(space, upkeep)
        self.health = Health(space, files, calls, self.run, free_bytes_min=free_bytes_min)

    def set_caps(self, capacity_bytes: int, free_bytes_min: int) -> None:
        """Change both caps; frames over them are for the caller to evict."""
        self.health.free_bytes_min = free_bytes_min
        self.space.set_capacity(capacity_bytes)

    # ---- opening and recovery ------------------------------------------------------------------

    async def open(
        self,
        *,
        fresh: bool = False,
        tried: bool = True,
        whole: bool = False,
        suspects: Set[FramePlace] = frozenset(),
    ) -> Recovered:
        """Lock the directory and find what is in it; `recall` has the runs.

        fresh: remove what is in it. tried: if not, `Health.try_out` before anything is read.
        whole: refuse a directory of which parts cannot be read. Otherwise they count as torn, and
        their room is freed. suspects: runs not to be trusted, as `abandon` returned them.

        Call it once. Raises ConfigError (locked, read-only, not a directory), Incompatible (another
        format version), DiskFailed, of which DiskUnreadable if it is not whole.
        """
        started = time.monotonic()
        self._calls.is_open = True
        try:
            await self.run(self._take_directory)
            if not tried:
                await self.health.try_out(0)
            if fresh:
                await self.run(partial(self._files.unlink, await self._tags()))
            if self.keys is not None:
                await self.run(partial(self._load_keys, await self._tags()))
            opened = await self._load()
            segments = [each.loaded for each in opened]
            if whole and (refused := sum(loaded.refused for loaded in segments)):
                raise DiskUnreadable(f"{refused} reads of its segments failed")
            self.health.suspects |= suspects
            if self.keys is not None and not any(loaded.refused for loaded in segments):
                used = {s.key.wrapped.epoch for s in segments if s.key is not None}
                await self.run(partial(self.keys.retire, used))
            recovered = await self._recover(opened, started)
        except BaseException:
            self._calls.is_open = False
            await self._release()
            raise
        self.upkeep.start()
        return recovered

    def _take_directory(self) -> None:
        """Lock the directory. Blocking; it is kept here, because a caller who is cancelled
        meanwhile gets no result of the thread."""
        taken = take_directory(self._disk, self._path, direct=self._files.direct)
        self._directory = taken
        self._files.direct, self.upkeep.punches = taken.direct, taken.punches

    def _load_keys(self, tags: Sequence[SegmentTag]) -> None:
        assert self.keys is not None
        self.keys.load(find_sealed=partial(holds_sealed, self._files, tags))

    async def _tags(self) -> list[SegmentTag]:
        names = await self.run(partial(self._disk.names, self._path))
        return sorted(tag for tag in map(parse_segment_name, names) if tag is not None)

    async def _load(self) -> list[_Opened]:
        loads = [self.run(partial(_load, self._files, tag)) for tag in await self._tags()]
        segments = all_or_raise(await asyncio.gather(*loads, return_exceptions=True))
        # A process that was killed may have left files that its directory does not durably name.
        await self.run(self._files.sync_directory)
        return list(_one_each(segments))

    async def _recover(self, opened: Sequence[_Opened], started: float) -> Recovered:
        segments = [loaded for loaded, _ in opened]
        for loaded, segment in opened:
            self.space.segments.add(segment, loaded.sizes)
        for loaded, segment in opened:
            for gap in loaded.gaps:
                self.space.add_hole(segment, gap)
        await self.health.measure_free()
        found = await self.run(partial(Found, segments, frozenset(self.health.suspects)))
        self.recall.begin(found)
        recovered = Recovered(
            runs=len(found),
            next_sequence=max((loaded.sequence_max for loaded in segments), default=0) + 1,
            dropped_frames=sum(loaded.dropped for loaded in segments),
            scan_s=time.monotonic() - started,
        )
        _log.info(
            "file tier open path=%s segments=%d unsealed=%d runs=%d dropped=%d nbytes=%d s=%.3f",
            self._path,
            len(segments),
            sum(not loaded.sealed for loaded in segments),
            recovered.runs,
            recovered.dropped_frames,
            self.space.segments.physical_nbytes,
            recovered.scan_s,
        )
        return recovered

    # ---- the end -------------------------------------------------------------------------------

    async def abandon(self) -> Set[FramePlace]:
        """Stop using the directory and unlock it, as a kill would: nothing more is written.

        Returns when the last call has come back, with the frames that are not to be trusted if the
        directory is opened again: never known to be durable, or not readable. A second call does
        nothing.
        """
        if self._directory is None:
            return self.health.not_to_be_trusted
        self._calls.is_open = False
        self.upkeep.stop()
        # A thread may still punch, seal or unlink. Once the lock is gone, that would remove frames
        # which the next owner of the directory has found.
        await self.upkeep.settle()
        await self._calls.ended()
        fds = [segment.fd for segment in self.space.segments if segment.fd is not None]
        await self.run(partial(_close_all, self._disk, fds))
        await self._release()
        return self.health.not_to_be_trusted

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Seal the tail and unlock. Waits for calls under way, at most `timeout_s` in all.

        What was set aside and not written is forgotten. An error of the disk is logged: whoever
        waits for a sync was told before. After a timeout the directory stays locked until the
        process ends, because a thread may still write to it. If cancelled, the rest is done, and
        the directory unlocked, when those calls have ended.
        """
        if not self._calls.is_open:
            return
        self._calls.is_open = False
        closing = self._closing = asyncio.ensure_future(self._close())
        done, _ = await asyncio.wait([closing], timeout=timeout_s)
        if not done:
            closing.cancel()
            self.upkeep.stop()
            _log.error("closed with I/O still under way path=%s", self._path)
            self._executor.shutdown(wait=False)
            return
        await closing

    async def _close(self) -> None:
        """Close and unlock. It ends by itself, whoever waits for it."""
        await self._calls.ended()
        self.space.abandon()
        self.upkeep.start()
        await self.upkeep.settle()
        try:
            await self.durability.sync_new_files()
        except Unavailable as error:
            _log.error("closed with files not synced path=%s reason=%r", self._path, str(error))
        await self._release()

    async def _release(self) -> None:
        """Unlock the directory, however often the caller is cancelled."""
        if self._directory is not None:
            unlocking = asyncio.ensure_future(self.run(self._unlock))
            try:
                await asyncio.shield(unlocking)
            except asyncio.CancelledError:
                await outlive([unlocking])
                raise
        self._executor.shutdown(wait=False)

    def _unlock(self) -> None:
        taken, self._directory = self._directory, None
        if taken is not None:
            _close_all(self._disk, [taken.lock_fd])


class _Opened(NamedTuple):
    """A segment as read, and the bookkeeping of it."""

    loaded: LoadedSegment
    segment: Segment


def _load(files: SegmentFiles, tag: SegmentTag) -> _Opened:
    loaded = load_segment(files, tag)
    return _Opened(loaded, adopted(loaded))


def _one_each(opened: Sequence[_Opened]) -> Iterator[_Opened]:
    """Yield one segment of each number. Another one was put there from elsewhere: it is left alone,
    and least of all believed if no key opens it."""
    seen: set[int] = set()
    for each in sorted(opened, key=lambda one: (one.loaded.tag.number, one.loaded.locked)):
        tag = each.loaded.tag
        if tag.number in seen:
            _log.warning("segment=ignored name=%s: its number is taken", segment_name(tag))
            continue
        seen.add(tag.number)
        yield each


def _close_all(disk: Disk, fds: Sequence[int]) -> None:
    for fd in fds:
        try:
            disk.close(fd)
        except OSError:
            pass  # an error could only concern frames that are not trusted anyway
