"""The file tier: bookkeeping on the event loop, blocking I/O in the tier's own threads.

Start here. `space.py` decides what goes where and counts, `segment_file.py` does the I/O of one
file, `recovery.py` reads files back, `directory.py` takes a directory into use. What is done behind
the callers' back (footers, holes, unlinks) is in `upkeep.py` and runs in one task, `_maintain`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvstore.format.frame import FrameHeader, SegmentTag, encode_header
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.tier.base import PART_NBYTES, Then
from kvstore.tier.file.directory import Directory, take_directory, try_out
from kvstore.tier.file.disk import Disk, RealDisk
from kvstore.tier.file.failure import DiskFailed, DiskUnreadable
from kvstore.tier.file.found import Found, FrameRecord, Taken
from kvstore.tier.file.live import live_positions
from kvstore.tier.file.pages import PagePool
from kvstore.tier.file.recovery import LoadedSegment, adopted, load_segment
from kvstore.tier.file.segment import FileExtent, FramePlace, PlacedFrame, Segment, State
from kvstore.tier.file.segment_file import SegmentFiles, parse_segment_name
from kvstore.tier.file.space import Space
from kvstore.tier.file.threads import Jobs, SmallJobs, run_blocking
from kvstore.tier.file.upkeep import Upkeep

T = TypeVar("T")
SEGMENT_NBYTES = 256 << 20
SMALL_READ_NBYTES = 256 << 10  # such reads share a thread,
SMALL_READS_NBYTES = 1 << 20  # so many bytes of them: less than a millisecond each
CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `open` found: how many runs, and where numbering goes on.

    dropped_frames: torn or rotten, found in scans. Rot in sealed segments shows when it is read.
    """

    runs: int
    next_sequence: int
    dropped_frames: int
    scan_s: float


class FileTier:
    """Frames in the segments of one directory. Implements `Tier[FileExtent]`.

    capacity_bytes: cap of the segments' physical bytes. segment_nbytes: a segment is sealed when
    its next frame would end beyond this. direct: use O_DIRECT where the file system has it; buffers
    are then page-aligned. threads: I/O in flight at most; executor: runs it instead of own threads.
    free_bytes_min: of the file system, left to others as `measure_free` finds it.

    No call has a deadline of its own: a disk may hang for as long as it likes. Do not cancel a call
    to enforce one. A cancelled call returns only when no thread touches its buffers any more.
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
    ) -> None:
        self.threads = threads
        self._path = path
        self._disk: Disk = disk if disk is not None else RealDisk()
        self._files = SegmentFiles(self._disk, path, direct=direct)
        self._space = Space(capacity_bytes, segment_nbytes)
        self._pages = PagePool()
        self._executor = executor or ThreadPoolExecutor(threads, thread_name_prefix="kvstore-file")
        self.run = self._run = partial(run_blocking, self._executor)
        self._small_reads = SmallJobs(self._executor, SMALL_READS_NBYTES)
        self._free_bytes_min = free_bytes_min
        self._upkeep = Upkeep(self._space, self._files, self._run)
        self._directory: Directory | None = None
        self._found = Found()
        self.suspects: set[FramePlace] = set()  # could not be read, or be known to be durable
        self._is_open = False
        self._abandoned = False
        self._calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._created = 0
        self._created_synced = 0
        self._maintenance: asyncio.Task[None] | None = None

    @property
    def capacity_bytes(self) -> int:
        """The cap."""
        return self._space.capacity_bytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes all segments really take, plus what is set aside and not yet written."""
        return self._space.segments.physical_nbytes

    @property
    def available_nbytes(self) -> int:
        """What frames may still take now; negative when the cap is exceeded, as after a cut."""
        return self._space.available_nbytes

    @property
    def freeing_nbytes(self) -> int:
        """Freed bytes whose holes are not yet punched: they become available without more frees."""
        return self._space.freeing_nbytes

    @property
    def holds_runs(self) -> bool:
        """Whether there is anything that could be freed."""
        return self._space.segments.hold_runs

    @property
    def max_frame_nbytes(self) -> int:
        """The largest frame `allocate` can ever find room for."""
        return self._space.frame_nbytes_max

    async def open(
        self,
        *,
        fresh: bool = False,
        tried: bool = True,
        whole: bool = False,
        suspects: Set[FramePlace] = frozenset(),
    ) -> Recovered:
        """Lock the directory and find what is in it; `recall` and `recall_oldest` index it.

        fresh: remove what is in it. tried: if not, `try_out` the device before anything is read.
        whole: refuse a directory of which parts cannot be read, which else count as torn, and their
        room is won back. suspects: runs that are not to be trusted, as `abandon` returned them.

        Call it once. Raises ConfigError (locked, read-only, not a directory), Incompatible (another
        format version), DiskFailed, of which DiskUnreadable if it is not whole.
        """
        started = time.monotonic()
        self._is_open = True
        try:
            take = partial(take_directory, self._disk, self._path, direct=self._files.direct)
            self._directory = await self._run(take)
            self._files.direct = self._directory.direct
            self._upkeep.punches = self._directory.punches
            if not tried:
                await self.try_out(0)
            if fresh:
                await self._run(partial(self._files.unlink, await self._tags()))
            segments = await self._load()
            if whole and (refused := sum(loaded.refused for loaded in segments)):
                raise DiskUnreadable(f"{refused} reads of what is on it failed")
            self.suspects |= suspects
            recovered = await self._recover(segments, started)
        except BaseException:
            self._is_open = False
            await self._release()
            raise
        self._start_maintenance()
        return recovered

    @property
    def unrecalled_runs(self) -> int:
        """How many of the runs found are not indexed yet."""
        return len(self._found)

    @property
    def oldest_unrecalled(self) -> int:
        """The sequence of the oldest of them. There must be one."""
        return self._found.oldest_sequence

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of all runs found."""
        return self._found.namespaces

    def recall(self, keys: Sequence[BlockKey]) -> list[FrameRecord]:
        """Return the runs found that hold any of `keys`, oldest first, each once ever.

        They are the caller's to index, and to `free`. Costs next to nothing when all are recalled.
        """
        return self._recalled(self._found.take(keys))

    def recall_oldest(self, count: int) -> list[FrameRecord]:
        """Return up to `count` runs by age, maybe none though some are left: see `recall`."""
        return self._recalled(self._found.take_oldest(count))

    def recall_all(self) -> list[FrameRecord]:
        """Return all runs found, by age, and free those with nothing live: for who has no index.

        live: positions that no newer run holds either.
        """
        found: list[FrameRecord] = []
        while self.unrecalled_runs:
            found += self.recall_oldest(self.unrecalled_runs)
        records = []
        newest = live_positions([record.header for record in found])
        for record, positions in zip(found, newest, strict=True):
            live = tuple(position for position in positions if position in record.live)
            if live:
                records.append(replace(record, live=live))
            else:
                self.free(record.location)
        return records

    def allocate(self, nbytes: int) -> FileExtent | None:
        """Set `nbytes` (FrameHeader.nbytes or more) aside. None: no room under the cap now.

        A frame may turn out smaller than its extent; the rest stays a hole and costs nothing.
        Raises InvalidRequest beyond `max_frame_nbytes`.
        """
        if not self._is_open:
            return None
        extent = self._space.allocate(nbytes)
        self._start_maintenance()  # it may have filled a segment
        return extent

    def encode(self, extent: FileExtent, header: FrameHeader) -> memoryview:
        """Return the aligned header page of the frame at `extent`: the first buffer to write.

        The page is the tier's; it is valid until the write has succeeded or the extent is freed.
        """
        if header.is_tombstone:
            raise InvalidRequest("tombstones go through write_tombstone")
        return self._encode(extent, header)

    async def write(self, extent: FileExtent, buffers: Sequence[memoryview]) -> None:
        """Write a frame: the page `encode` returned, then each block's padded stored bytes.

        Not durable before `sync`. Raises DiskFull or DiskFailed; the extent can then be written
        again or freed.
        """
        with self._call():
            segment, frame = self._space.find(extent)
            _check_frame(frame, buffers)
            frame.state = State.WRITING
            try:
                fd = await self._created_file(segment)
                measured = await self._run(
                    partial(self._files.write, segment.tag, fd, buffers, extent.offset)
                )
            except BaseException:
                frame.state = State.FAILED
                raise
            self._return_page(frame)
            self._space.written(extent, measured)
            self._start_maintenance()

    def read(
        self,
        extent: FileExtent,
        offset: int,
        targets: Sequence[memoryview],
        then: Then | None = None,
        parts: int = 1,
    ) -> Coroutine[Any, Any, None]:
        """Fill `targets` (whole pages) from `offset` of the frame. Bytes are not verified, unless
        by `then`. Small reads, and those of several targets, stay in one part.

        The threads have it when this returns; what it returns is to be awaited, whatever happens,
        and raises DiskFailed, or CorruptBlock if the file is gone or too short.
        """
        segment, frame = self._space.find(extent)
        nbytes = sum(target.nbytes for target in targets)
        if frame.state is not State.WRITTEN:
            raise InvalidRequest(f"{extent} is not written")
        if offset < 0 or offset % PAGE_NBYTES or offset + nbytes > extent.nbytes:
            raise InvalidRequest(f"bytes {offset}..{offset + nbytes} of {extent}")
        _check_pages(targets)
        begin = extent.offset + offset
        with ExitStack() as call:
            call.enter_context(self._call())
            if nbytes <= SMALL_READ_NBYTES:
                read = partial(self._read, segment.tag, targets, begin, slice(0, nbytes), then)
                return _within(call.pop_all(), self._small_reads.run(nbytes, read))
            step = nbytes if len(targets) > 1 else _step(nbytes, parts)
            reads = []
            for at in range(0, nbytes, step):
                part = slice(at, min(at + step, nbytes))
                some = targets if step == nbytes else [targets[0][part]]
                reads.append(partial(self._read, segment.tag, some, begin + at, part, then))
            jobs = Jobs(self._executor, reads)
            return _within(call.pop_all(), jobs.ended())

    def _read(
        self,
        tag: SegmentTag,
        targets: Sequence[memoryview],
        offset: int,
        part: slice,
        then: Then | None,
    ) -> None:
        self._files.read(tag, targets, offset)
        if then is not None:
            then(part)

    def path_of(self, extent: FileExtent) -> Path:
        """Return the file that a written frame lies in, at `extent.offset`, until it is freed."""
        segment, _ = self._space.find(extent)
        return self._files.path(segment.tag)

    def kill_found(self, tombstone: FrameHeader) -> None:
        """Let a tombstone that will be written kill what is not recalled yet, from now on."""
        self._found.note(tombstone)

    async def write_tombstone(self, header: FrameHeader) -> FileExtent:
        """Write a tombstone, with its own room. A delete is durable after `sync([extent])`.

        The tier keeps it for as long as a frame it kills may exist. Raises DiskFull or DiskFailed.
        """
        if not header.is_tombstone:
            raise InvalidRequest("a run is no tombstone")
        self._check_open()
        extent = self._space.allocate(header.nbytes, is_tombstone=True)
        assert extent is not None  # tombstones are not refused
        try:
            await self.write(extent, [self._encode(extent, header)])
        except BaseException:
            self.free(extent)
            raise
        return extent

    async def sync(self, extents: Sequence[FileExtent] = ()) -> None:
        """Make every write that has returned durable.

        Raises DiskFailed: then none of the writes since the last success may be durable, now or
        ever (the kernel drops what it could not write): free these frames or write them elsewhere.
        Their segment takes no more frames and gets no footer, so that the next start verifies what
        is in it. The failure may have met a sync that somebody else called meanwhile, and then it
        is not met again: name the frames that matter as `extents`, and it is raised here too.
        """
        with self._call():
            created = self._created
            dirty = [s for s in self._space.segments if s.writes_synced < s.writes]
            jobs = [self._sync_segment(segment, segment.sync_failures) for segment in dirty]
            if self._created_synced < created:
                jobs.append(self._sync_directory(created))
            outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        _all_or_raise(outcomes)
        if any(self._space.is_lost(extent) for extent in extents):
            raise DiskFailed("an fdatasync failed before")

    def free(self, extent: FileExtent) -> None:
        """Give a frame up. Its bytes are won back in the background: see `freeing_nbytes`."""
        _, frame = self._space.find(extent)
        self._space.free(extent)
        self._return_page(frame)
        self._start_maintenance()

    def set_caps(self, capacity_bytes: int, free_bytes_min: int) -> None:
        """Change both caps; frames over them are for the caller to evict."""
        self._free_bytes_min = free_bytes_min
        self._space.set_capacity(capacity_bytes)

    def keep_for(self, sequence_min: Callable[[], int]) -> None:
        """Keep tombstones for runs that have a number and no place yet; it returns the least."""
        self._space.segments.expected = sequence_min

    async def measure_free(self) -> None:
        """Look how much the disk has left, if some of it is for others."""
        if self._free_bytes_min:
            measure = partial(self._disk.free_nbytes, self._path)
            self._space.leave_free(await self._run(measure), self._free_bytes_min)

    async def try_out(self, room_nbytes: int) -> None:
        """Write a small file, sync it and read it again. Raises DiskFull, DiskFailed.

        room_nbytes: what the file system must have left.
        """
        direct = self._files.direct
        trial = partial(try_out, self._disk, self._path, direct=direct, room_nbytes=room_nbytes)
        with self._call():
            await self._run(trial)

    def distrust(self, extent: FileExtent) -> None:
        """Note that a frame could not be read: see `abandon`."""
        self.suspects.add(FramePlace(self._space.segments[extent.segment].tag, extent.offset))

    async def abandon(self) -> Set[FramePlace]:
        """Stop using the directory and unlock it, as a kill would: nothing more is written.

        Returns when the last call has come back, with what is not to be trusted if the directory is
        opened again: what never was known to be durable, and what could not be read.
        """
        self._is_open, self._abandoned = False, True
        if self._maintenance is not None:
            self._maintenance.cancel()
            # A thread may be in the middle of a piece of it. Punched, sealed or unlinked after the
            # lock is gone, a frame would vanish that whoever takes the directory next has found.
            await self.settle()
        await self._quiet.wait()
        segments = self._space.segments
        fds = [s.fd for s in segments if s.fd is not None]
        await self._run(partial(_close_all, self._disk, fds))
        await self._release()
        tags = {segment.tag for segment in segments}
        return self._space.segments.not_durable | {
            each for each in self.suspects if each.tag in tags
        }

    async def settle(self) -> None:
        """Wait until footers, holes and unlinks that are due now are done."""
        while self._maintenance is not None and not self._maintenance.done():
            await asyncio.wait([self._maintenance])

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Seal the tail and unlock. Waits for calls under way, at most `timeout_s` in all.

        What was set aside and not written is forgotten. After a timeout the directory stays locked
        until the process ends, because a thread may still write to it.
        """
        if not self._is_open:
            return
        self._is_open = False
        closing = asyncio.ensure_future(self._close())
        done, _ = await asyncio.wait([closing], timeout=timeout_s)
        if not done:
            closing.cancel()
            if self._maintenance is not None:
                self._maintenance.cancel()
            _log.error("closed with I/O still under way path=%s", self._path)
            self._executor.shutdown(wait=False)
            return
        await closing
        await self._release()

    # What follows is private: recovery, upkeep, threads.

    async def _tags(self) -> list[SegmentTag]:
        names = await self._run(partial(self._disk.names, self._path))
        return sorted(tag for tag in map(parse_segment_name, names) if tag is not None)

    async def _load(self) -> list[LoadedSegment]:
        loads = [self._run(partial(load_segment, self._files, tag)) for tag in await self._tags()]
        segments = _all_or_raise(await asyncio.gather(*loads, return_exceptions=True))
        # A process that was killed may have left files that its directory does not durably name.
        await self._run(self._files.sync_directory)
        return segments

    async def _recover(self, segments: Sequence[LoadedSegment], started: float) -> Recovered:
        for loaded in segments:
            self._space.segments.add(adopted(loaded), loaded.sizes)
        for loaded in segments:
            for gap in loaded.gaps:
                self._space.add_hole(self._space.segments[loaded.tag.number], gap)
        await self.measure_free()
        self._found = await self._run(partial(Found, segments, frozenset(self.suspects)))
        recovered = Recovered(
            runs=len(self._found),
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
            self.physical_nbytes,
            recovered.scan_s,
        )
        return recovered

    def _recalled(self, taken: Taken) -> list[FrameRecord]:
        for extent in taken.dead:
            self._space.free(extent)
        if taken.dead:
            self._start_maintenance()
        return taken.records

    def _encode(self, extent: FileExtent, header: FrameHeader) -> memoryview:
        segment, frame = self._space.find(extent)
        if header.nbytes > extent.nbytes:
            raise InvalidRequest(f"a frame of {header.nbytes} bytes for {extent}")
        if frame.state not in (State.SET_ASIDE, State.FAILED):
            raise InvalidRequest(f"{extent} is already written")
        page = frame.page if frame.page is not None else self._pages.take()
        page[:] = encode_header(header, segment.tag, extent.offset)
        self._space.encoded(extent, header, page)
        return page

    def _return_page(self, frame: PlacedFrame) -> None:
        if frame.page is not None:
            self._pages.give(frame.page)
            frame.page = None

    async def _created_file(self, segment: Segment) -> int:
        async with segment.busy:
            if segment.fd is None:
                segment.fd = await self._run(partial(self._files.create, segment.tag))
                self._created += 1
            return segment.fd

    async def _sync_segment(self, segment: Segment, failures: int) -> None:
        try:
            async with segment.busy:
                await self._upkeep.sync(segment)
            lost = segment.sync_failures > failures
        finally:
            self._start_maintenance()
        if lost:
            raise DiskFailed("an fdatasync failed meanwhile")

    async def _sync_directory(self, created: int) -> None:
        await self._run(self._files.sync_directory)
        self._created_synced = max(self._created_synced, created)

    def _start_maintenance(self) -> None:
        running = self._maintenance is not None and not self._maintenance.done()
        if not running and not self._abandoned and self._upkeep.next() is not None:
            self._maintenance = asyncio.get_running_loop().create_task(self._maintain())

    async def _maintain(self) -> None:
        while (work := self._upkeep.next()) is not None:
            await work()

    async def _close(self) -> None:
        await self._quiet.wait()
        self._space.abandon()
        self._start_maintenance()
        await self.settle()
        if self._created_synced < self._created:
            await self._sync_directory(self._created)

    async def _release(self) -> None:
        if self._directory is not None:
            await self._run(partial(self._disk.close, self._directory.lock_fd))
        self._executor.shutdown(wait=False)

    def _check_open(self) -> None:
        if not self._is_open:
            raise Unavailable("the file tier is not open")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Keep `close` waiting while a call is under way."""
        self._check_open()
        self._calls += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._quiet.set()


async def _within(call: ExitStack, work: Awaitable[object]) -> None:
    with call:
        await work


def _close_all(disk: Disk, fds: Sequence[int]) -> None:
    for fd in fds:
        try:
            disk.close(fd)
        except OSError:
            pass  # what it could still tell is about frames that are not counted on


def _all_or_raise(outcomes: Sequence[T | BaseException]) -> list[T]:
    """Return the results of jobs that have all ended, or raise the first error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _check_frame(frame: PlacedFrame, buffers: Sequence[memoryview]) -> None:
    if frame.page is None or frame.state not in (State.SET_ASIDE, State.FAILED):
        raise InvalidRequest("encode the header first; a frame is written once")
    if not buffers or buffers[0] is not frame.page:
        raise InvalidRequest("the first buffer is the page that `encode` returned")
    if sum(buffer.nbytes for buffer in buffers) != frame.frame_nbytes:
        raise InvalidRequest(f"the buffers do not hold the {frame.frame_nbytes} bytes of the frame")
    _check_pages(buffers)


def _step(nbytes: int, parts: int) -> int:
    """Return how large the parts of a read are."""
    return -(-nbytes // parts // PART_NBYTES) * PART_NBYTES


def _check_pages(buffers: Sequence[memoryview]) -> None:
    if any(buffer.nbytes % PAGE_NBYTES or not buffer.c_contiguous for buffer in buffers):
        raise InvalidRequest("a buffer is not whole pages")
