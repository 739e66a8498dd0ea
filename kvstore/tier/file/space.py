"""Who lives where in the segments, and what it costs: pure bookkeeping, no I/O.

The cap is kept by counting before anything is written: the measured physical bytes of every file,
what is set aside and not yet written, and the footers that unsealed segments will still get. Freed
space counts until its hole is really punched.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvstore.format.frame import (
    FOOTER_RECORD_NBYTES_MAX,
    NO_SEQUENCE,
    FrameHeader,
    SegmentTag,
    pack_header,
)
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.tier.file.disk import Sizes

SEGMENT_NBYTES_MIN = 1 << 16
CAPACITY_BYTES_MIN = 1 << 18
RESERVE_NBYTES_MAX = 1 << 20
# What a segment costs beside its frames: header page, rounding of the footer, trailer page.
SEGMENT_OVERHEAD_NBYTES = 3 * PAGE_NBYTES


class FileExtent(NamedTuple):
    """A place in the file tier: bytes [offset, offset + nbytes) of a segment."""

    segment: int
    offset: int
    nbytes: int


class FramePlace(NamedTuple):
    """Where a frame is, under a name that no later segment of the directory gets."""

    tag: SegmentTag
    offset: int


class Hole(NamedTuple):
    """A freed range. set_aside_nbytes: what a failed write may have left there, still charged."""

    offset: int
    nbytes: int
    set_aside_nbytes: int = 0


class Measured(NamedTuple):
    """Bytes a file takes. Writes that ended before a measurement of a lower order are in it."""

    physical_nbytes: int
    order: int


class State(Enum):
    """Of a frame."""

    SET_ASIDE = auto()
    WRITING = auto()
    FAILED = auto()  # some of it may be on disk; it may be written again
    WRITTEN = auto()


class Phase(Enum):
    """Of a segment."""

    OPEN = auto()  # takes frames
    FULL = auto()  # takes no more; gets its footer when its last write has ended
    CLOSED = auto()  # sealed, or given up as it is: the next start scans it


@dataclass(slots=True)
class PlacedFrame:
    """A frame that was not freed.

    frame_nbytes: encoded size, at most nbytes; what is left of the extent stays a hole.
    packed: the header for the footer, until the segment closes. page: lent until written.
    write: which of its segment's writes it was; 0 for one found on disk.
    """

    nbytes: int
    is_tombstone: bool
    state: State = State.SET_ASIDE
    frame_nbytes: int = 0
    packed: bytes = b""
    page: memoryview | None = None
    write: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """One file."""

    tag: SegmentTag
    phase: Phase = Phase.OPEN
    end: int = PAGE_NBYTES  # where the next frame goes
    frames: dict[int, PlacedFrame] = field(default_factory=dict)  # by offset
    runs: int = 0  # of `frames`
    pending: int = 0  # of `frames`, not WRITTEN
    placed: int = 0  # frames ever, freed or not
    holes: list[Hole] = field(default_factory=list)  # freed, to be punched
    run_sequence_min: int = NO_SEQUENCE  # of any run the file may still hold
    tombstone_sequence_max: int = 0
    physical_nbytes: int = 0
    set_aside_nbytes: int = 0
    measured_order: int = -1
    fd: int | None = None  # for writing, until the segment closes
    writes: int = 0
    writes_synced: int = 0  # durable, or somebody was told that they are not
    writes_durable: int = 0
    sync_failures: int = 0  # what was written before one may be gone: such a file gets no footer
    given_up: set[int] = field(default_factory=set)  # offsets of frames freed before durable
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)  # create, sync, seal, one at a time

    @property
    def overhead_nbytes(self) -> int:
        """What closing this segment may still add to the file."""
        if self.phase is Phase.CLOSED:
            return 0
        return SEGMENT_OVERHEAD_NBYTES + self.placed * FOOTER_RECORD_NBYTES_MAX

    @property
    def not_durable(self) -> set[int]:
        """Offsets of frames, freed or not, that no fdatasync is known to have covered."""
        return self.given_up.union(at for at, f in self.frames.items() if not self.is_durable(f))

    def is_durable(self, frame: PlacedFrame) -> bool:
        """Say whether an fdatasync is known to cover a frame of this segment."""
        return frame.state is State.WRITTEN and frame.write <= self.writes_durable

    @property
    def packed_headers(self) -> list[bytes]:
        """What the footer lists, in file order."""
        return [f.packed for _, f in sorted(self.frames.items()) if f.state is State.WRITTEN]


class Space:
    """The segments of one directory under one cap."""

    def __init__(self, capacity_bytes: int, segment_nbytes: int) -> None:
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError(f"a file tier of {capacity_bytes} bytes; the least is 256 KiB")
        if segment_nbytes < SEGMENT_NBYTES_MIN or segment_nbytes % PAGE_NBYTES:
            raise ConfigError(
                f"segments of {segment_nbytes} bytes; use whole pages, 64 KiB or more"
            )
        self.capacity_bytes = capacity_bytes
        self.room_bytes = capacity_bytes  # what the disk leaves of it: see `leave_free`
        self.segment_nbytes = segment_nbytes
        self.reserve_nbytes = min(RESERVE_NBYTES_MAX, capacity_bytes // 32)  # for tombstones
        self.segments: dict[int, Segment] = {}
        self.unclosed: dict[int, Segment] = {}
        self.current: Segment | None = None
        self.next_number = 1
        self.physical_nbytes = 0  # measured and set aside, over all segments
        self.freeing_nbytes = 0  # in holes that are not yet punched
        # The lowest sequence of a run that has a number, and is not known here yet.
        self.expected: Callable[[], int] = lambda: NO_SEQUENCE

    @property
    def available_nbytes(self) -> int:
        """What runs and their overhead may still take; negative when the cap is exceeded."""
        closing = sum(segment.overhead_nbytes for segment in self.unclosed.values())
        cap = min(self.capacity_bytes, self.room_bytes)
        return cap - self.reserve_nbytes - self.physical_nbytes - closing

    @property
    def not_durable(self) -> set[FramePlace]:
        """Where frames are, or were, that no fdatasync is known to have covered."""
        return {
            FramePlace(segment.tag, offset)
            for segment in self.segments.values()
            for offset in segment.not_durable
        }

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap. What is over a lower one is for the caller to evict."""
        self.capacity_bytes = self.room_bytes = nbytes  # what the disk leaves is measured soon
        self.reserve_nbytes = min(RESERVE_NBYTES_MAX, nbytes // 32)

    def leave_free(self, free_nbytes: int, kept_nbytes: int) -> None:
        """Note what is free on the disk, of which `kept_nbytes` are for others."""
        on_disk = sum(segment.physical_nbytes for segment in self.segments.values())
        self.room_bytes = on_disk + free_nbytes - kept_nbytes

    @property
    def frame_nbytes_max(self) -> int:
        """The largest frame that an empty tier takes."""
        costs = self.reserve_nbytes + SEGMENT_OVERHEAD_NBYTES + FOOTER_RECORD_NBYTES_MAX
        room = min(self.segment_nbytes - PAGE_NBYTES, self.capacity_bytes - costs)
        return room // PAGE_NBYTES * PAGE_NBYTES

    def allocate(self, nbytes: int, *, is_tombstone: bool = False) -> FileExtent | None:
        """Set a range aside at the end of the current segment, or of a new one."""
        size = padded(nbytes)
        if not 0 < size <= self.frame_nbytes_max:
            raise InvalidRequest(
                f"a frame of {nbytes} bytes; 1..{self.frame_nbytes_max} are allowed"
            )
        current = self.current
        if current is not None and current.end + size > self.segment_nbytes:
            current = None
        cost = size + FOOTER_RECORD_NBYTES_MAX + (SEGMENT_OVERHEAD_NBYTES if current is None else 0)
        if not is_tombstone and cost > self.available_nbytes:
            return None
        segment = current or self._roll_over()
        extent = FileExtent(segment.tag.number, segment.end, size)
        segment.frames[segment.end] = PlacedFrame(size, is_tombstone)
        segment.end += size
        segment.placed += 1
        segment.pending += 1
        segment.runs += not is_tombstone
        self._charge(segment, set_aside=size)
        return extent

    def find(self, extent: FileExtent) -> tuple[Segment, PlacedFrame]:
        """Return what stands at `extent`. Raises InvalidRequest if it was freed or never given."""
        segment = self.segments.get(extent.segment)
        frame = segment.frames.get(extent.offset) if segment is not None else None
        if segment is None or frame is None or frame.nbytes != extent.nbytes:
            raise InvalidRequest(f"{extent} is not allocated")
        return segment, frame

    def encoded(self, extent: FileExtent, header: FrameHeader, page: memoryview) -> None:
        """Note what will be written at `extent`, and the page lent for it."""
        segment, frame = self.find(extent)
        frame.packed, frame.page, frame.frame_nbytes = pack_header(page), page, header.nbytes
        if frame.is_tombstone:
            segment.tombstone_sequence_max = max(segment.tombstone_sequence_max, header.sequence)
        else:
            segment.run_sequence_min = min(segment.run_sequence_min, header.sequence)

    def written(self, extent: FileExtent, measured: Measured) -> None:
        """Note that all of the frame is in the file, measured since."""
        segment, frame = self.find(extent)
        frame.state = State.WRITTEN
        segment.pending -= 1
        segment.writes += 1
        frame.write = segment.writes
        self._charge(segment, set_aside=-frame.nbytes)
        self.measured(segment, measured)

    def is_lost(self, extent: FileExtent) -> bool:
        """Say whether a written frame was in an fdatasync that failed, or not in any yet."""
        segment = self.segments.get(extent.segment)
        frame = segment.frames.get(extent.offset) if segment is not None else None
        return segment is not None and frame is not None and frame.write > segment.writes_durable

    def measured(self, segment: Segment, measured: Measured) -> None:
        """Note the size of a file. A measurement that began before the last one changes nothing."""
        if measured.order > segment.measured_order:
            segment.measured_order = measured.order
            self._charge(segment, physical=measured.physical_nbytes - segment.physical_nbytes)

    def free(self, extent: FileExtent) -> None:
        """Give a range up. Raises InvalidRequest if it is unknown or being written."""
        segment, frame = self.find(extent)
        if frame.state is State.WRITING:
            raise InvalidRequest(f"{extent} is being written")
        del segment.frames[extent.offset]
        if not segment.is_durable(frame):
            segment.given_up.add(extent.offset)
        segment.runs -= not frame.is_tombstone
        if frame.state is not State.WRITTEN:
            segment.pending -= 1
        if frame.state is State.SET_ASIDE:
            self._charge(segment, set_aside=-frame.nbytes)
        else:
            left = frame.nbytes if frame.state is State.FAILED else 0
            self.add_hole(segment, Hole(extent.offset, extent.nbytes, left))

    def add_hole(self, segment: Segment, hole: Hole) -> None:
        """Queue a range for punching."""
        segment.holes.append(hole)
        self.freeing_nbytes += hole.nbytes

    def take_holes(self, segment: Segment) -> list[Hole]:
        """Return the queued holes, neighbours merged. Answer with `punched`, done or given up."""
        taken, segment.holes = sorted(segment.holes), []
        merged: list[Hole] = []
        for hole in taken:
            if merged and merged[-1].offset + merged[-1].nbytes == hole.offset:
                last = merged.pop()
                hole = Hole(  # noqa: PLW2901 - the grown one takes its place
                    last.offset,
                    last.nbytes + hole.nbytes,
                    last.set_aside_nbytes + hole.set_aside_nbytes,
                )
            merged.append(hole)
        return merged

    def punched(self, segment: Segment, holes: Sequence[Hole]) -> None:
        """Stop waiting for holes, done or given up. Call `measured` first."""
        self.freeing_nbytes -= sum(hole.nbytes for hole in holes)
        self._charge(segment, set_aside=-sum(hole.set_aside_nbytes for hole in holes))

    def retire(self, segment: Segment) -> None:
        """Take no more frames into `segment`."""
        if segment.phase is Phase.OPEN:
            segment.phase = Phase.FULL
        if self.current is segment:
            self.current = None

    def abandon(self) -> None:
        """Forget every range that was set aside and not written, and take no more frames."""
        for segment in list(self.unclosed.values()):
            for offset, frame in list(segment.frames.items()):
                if frame.state in (State.SET_ASIDE, State.FAILED):
                    self.free(FileExtent(segment.tag.number, offset, frame.nbytes))
            self.retire(segment)

    def closed(self, segment: Segment) -> None:
        """Note that `segment` got its footer, or never will."""
        segment.phase = Phase.CLOSED
        self.unclosed.pop(segment.tag.number, None)
        for frame in segment.frames.values():
            frame.packed = b""

    def sealable(self) -> list[Segment]:
        """Return full segments that wait for their footer. Dead ones are unlinked instead."""
        full = [s for s in self.unclosed.values() if s.phase is Phase.FULL and not s.pending]
        return [s for s in full if s.runs or self.is_needed(s)]

    def unlinkable(self) -> list[Segment]:
        """Return segments that hold nothing any more."""
        return [
            segment
            for segment in self.segments.values()
            if not segment.runs
            and not segment.pending
            and segment.phase is not Phase.OPEN
            and not self.is_needed(segment)
        ]

    def is_needed(self, segment: Segment) -> bool:
        """Say whether another file may still hold a run that a tombstone in this one kills."""
        newest = segment.tombstone_sequence_max
        if not segment.frames or not newest:
            return False
        return self.expected() < newest or any(
            other.run_sequence_min < newest
            for other in self.segments.values()
            if other is not segment
        )

    def add(self, segment: Segment, sizes: Sizes) -> None:
        """Take in a segment found on disk, with its frames."""
        self.segments[segment.tag.number] = segment
        if segment.phase is not Phase.CLOSED:
            self.unclosed[segment.tag.number] = segment
        self.next_number = max(self.next_number, segment.tag.number + 1)
        self._charge(segment, physical=sizes.physical_nbytes)

    def remove(self, segment: Segment) -> None:
        """Forget a segment whose file is durably gone."""
        self.freeing_nbytes -= sum(hole.nbytes for hole in segment.holes)
        self._charge(
            segment, physical=-segment.physical_nbytes, set_aside=-segment.set_aside_nbytes
        )
        self.unclosed.pop(segment.tag.number, None)
        del self.segments[segment.tag.number]

    def _roll_over(self) -> Segment:
        if self.current is not None:
            self.retire(self.current)
        segment = Segment(SegmentTag(self.next_number, secrets.randbits(64)))
        self.next_number += 1
        self.segments[segment.tag.number] = self.unclosed[segment.tag.number] = segment
        self.current = segment
        return segment

    def _charge(self, segment: Segment, *, physical: int = 0, set_aside: int = 0) -> None:
        segment.physical_nbytes += physical
        segment.set_aside_nbytes += set_aside
        self.physical_nbytes += physical + set_aside
