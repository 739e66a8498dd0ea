"""The frames of one directory, from `allocate` to `free`: how one is written and read."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.format.frame import FrameHeader, SegmentTag, encode_header
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import InvalidRequest
from kvstore.system.turns import Sized
from kvstore.tier.base import PART_NBYTES, Then
from kvstore.tier.bounces import BOUNCES
from kvstore.tier.file.calls import Calls
from kvstore.tier.file.durability import Durability
from kvstore.tier.file.pages import PagePool
from kvstore.tier.file.sealed_io import Headers, SealedRead, Target, write_sealed
from kvstore.tier.file.segment import FileExtent, Measured, PlacedFrame, Segment, State
from kvstore.tier.file.segment_file import SegmentFiles
from kvstore.tier.file.space import Space
from kvstore.tier.file.threads import Jobs, SmallJobs, run_blocking
from kvstore.tier.file.upkeep import Upkeep

SMALL_READ_NBYTES = 256 << 10  # such reads share a thread,
SMALL_READS_NBYTES = 1 << 20  # so many bytes of them: less than a millisecond each


class Frames:
    """Implements `Tier[FileExtent]`.

    Do not cancel a call to enforce a deadline: a cancelled call returns only when no thread touches
    its buffers any more.
    """

    def __init__(
        self,
        space: Space,
        files: SegmentFiles,
        *,
        durability: Durability,
        upkeep: Upkeep,
        calls: Calls,
        executor: Executor,
    ) -> None:
        self._space = space
        self._files = files
        self._durability = durability
        self._upkeep = upkeep
        self._calls = calls
        self._executor = executor
        self._small_reads = SmallJobs(executor, SMALL_READS_NBYTES)
        self._pages = PagePool()
        self._bounces = BOUNCES
        self._headers = Headers()

    @property
    def capacity_bytes(self) -> int:
        """The cap of the segments' physical bytes."""
        return self._space.capacity_bytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes all segments really take, plus what is set aside and not yet written."""
        return self._space.segments.physical_nbytes

    def allocate(self, nbytes: int) -> FileExtent | None:
        """Set `nbytes` (FrameHeader.nbytes or more) aside. None: no room under the cap now.

        A frame may turn out smaller than its extent; the rest stays a hole and costs nothing.
        Raises InvalidRequest beyond `Space.frame_nbytes_max`.
        """
        if not self._calls.is_open:
            return None
        extent = self._space.allocate(nbytes)
        self._upkeep.start()  # it may have filled a segment
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

        Not durable before `Durability.sync`. Raises DiskFull or DiskFailed; the extent can then be
        written again or freed.
        """
        with self._calls.one():
            segment, frame = self._space.find(extent)
            _check_frame(frame, buffers)
            frame.state = State.WRITING
            try:
                fd = await self._durability.opened(segment)
                write = partial(self._write, segment, frame, fd, buffers, extent.offset)
                work = Sized(write, frame.nbytes)
                measured, packed = await run_blocking(self._executor, work)
            except BaseException:
                frame.state = State.FAILED
                raise
            frame.header, frame.packed = None, packed
            self._return_page(frame)
            self._space.written(extent, measured)
            self._upkeep.start()

    async def write_tombstone(self, header: FrameHeader) -> FileExtent:
        """Allocate and write a tombstone. The delete is durable after `Durability.sync([extent])`.

        The tier keeps it for as long as a frame it kills may exist. Raises DiskFull or DiskFailed.
        """
        if not header.is_tombstone:
            raise InvalidRequest("a run is no tombstone")
        self._calls.check_open()
        extent = self._space.allocate(header.nbytes, is_tombstone=True)
        assert extent is not None  # tombstones are not refused
        try:
            await self.write(extent, [self._encode(extent, header)])
        except BaseException:
            self.free(extent)
            raise
        return extent

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

        Of a sealed frame, blocks are read as a whole, and decrypted; `then` is called once.
        WrongTag names those that are not what was written: their targets then hold zeros.

        The threads begin before this returns. The caller must await the result in any case. It
        raises DiskFailed, or CorruptBlock if the file is gone or too short.
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
            call.enter_context(self._calls.one())
            if segment.key is not None:
                place = (segment.tag, extent, segment.key)
                sealed = SealedRead(
                    self._files, place, offset, targets, self._bounces, headers=self._headers
                )
                sealed.then = then
                reading = self._read_sealed(sealed, parts)
                return _within(call.pop_all(), reading)
            if nbytes <= SMALL_READ_NBYTES:
                read = partial(self._read, segment.tag, targets, begin, slice(0, nbytes), then)
                return _within(call.pop_all(), self._small_reads.run(nbytes, read))
            step = nbytes if len(targets) > 1 else _step(nbytes, parts)
            reads = []
            for at in range(0, nbytes, step):
                part = slice(at, min(at + step, nbytes))
                some = targets if step == nbytes else [targets[0][part]]
                read = partial(self._read, segment.tag, some, begin + at, part, then)
                reads.append(Sized(read, part.stop - at))
            jobs = Jobs(self._executor, reads)
            return _within(call.pop_all(), jobs.ended())

    def path_of(self, extent: FileExtent) -> Path | None:
        """Return the file that a written frame lies in, at `extent.offset`, until it is freed; None
        for a sealed one: nobody else can read it."""
        segment, _ = self._space.find(extent)
        return self._files.path(segment.tag) if segment.key is None else None

    def free(self, extent: FileExtent) -> None:
        """Free a frame. Its bytes become available in the background (`Space.freeing_nbytes`)."""
        _, frame = self._space.find(extent)
        self._space.free(extent)
        self._return_page(frame)
        self._upkeep.start()

    def _encode(self, extent: FileExtent, header: FrameHeader) -> memoryview:
        segment, frame = self._space.find(extent)
        if header.nbytes > extent.nbytes:
            raise InvalidRequest(f"a frame of {header.nbytes} bytes for {extent}")
        if frame.state not in (State.SET_ASIDE, State.FAILED):
            raise InvalidRequest(f"{extent} is already written")
        page = frame.page if frame.page is not None else self._pages.take()
        sealed = self._files.keys is not None
        if not sealed:
            page[:] = encode_header(header, segment.tag, extent.offset)
        self._space.encoded(extent, header, page, sealed=sealed)
        return page

    def _return_page(self, frame: PlacedFrame) -> None:
        if frame.page is not None:
            self._pages.give(frame.page)
            frame.page = None

    def _write(
        self,
        segment: Segment,
        frame: PlacedFrame,
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> tuple[Measured, bytes]:
        """Write a frame, in a thread; return what the file then takes, and the packed header."""
        if segment.key is None:
            return self._files.write(segment.tag, fd, buffers, offset), frame.packed
        assert frame.header is not None
        target = Target(segment.tag, fd, segment.key, offset)
        return write_sealed(self._files, target, frame.header, buffers, self._bounces)

    def _read_sealed(self, sealed: SealedRead, parts: int) -> Coroutine[Any, Any, object]:
        if sealed.nbytes <= SMALL_READ_NBYTES:
            return self._small_reads.run(sealed.nbytes, sealed.run)
        step = _step(sealed.nbytes, parts)
        if step >= sealed.nbytes or not sealed.may_be_split:
            return Jobs(self._executor, [Sized(sealed.run, sealed.nbytes)]).ended()
        return Jobs(self._executor, list(sealed.parts(step))).ended()

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


async def _within(call: ExitStack, work: Awaitable[object]) -> None:
    with call:
        await work


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
