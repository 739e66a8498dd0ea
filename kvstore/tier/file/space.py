"""The room in one directory, counted before anything is written: pure bookkeeping, no I/O.

The cap bounds the measured physical bytes of every file, the bytes set aside and not yet written,
and the footers that unsealed segments will still get. Freed bytes count until their hole is really
punched.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.format.frame import FOOTER_RECORD_NBYTES_MAX, FrameHeader, pack_header
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.tier.file.segment import (
    SEGMENT_OVERHEAD_NBYTES,
    FileExtent,
    Hole,
    Measured,
    PlacedFrame,
    Segment,
    State,
)
from kvstore.tier.file.segments import Segments

SEGMENT_NBYTES_MIN = 1 << 16
CAPACITY_BYTES_MIN = 1 << 18
RESERVE_NBYTES_MAX = 1 << 20


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
        self.segments = Segments()
        self.freeing_nbytes = 0  # in holes that are not yet punched: available without more frees

    @property
    def available_nbytes(self) -> int:
        """What runs and their overhead may still take; negative when the cap is exceeded."""
        closing = sum(segment.overhead_nbytes for segment in self.segments.unclosed.values())
        cap = min(self.capacity_bytes, self.room_bytes)
        return cap - self.reserve_nbytes - self.segments.physical_nbytes - closing

    def set_capacity(self, nbytes: int) -> None:
        """Change the cap. Frames over a lower one are for the caller to evict."""
        self.capacity_bytes = self.room_bytes = nbytes  # what the disk leaves is measured soon
        self.reserve_nbytes = min(RESERVE_NBYTES_MAX, nbytes // 32)

    def leave_free(self, free_nbytes: int, kept_nbytes: int) -> None:
        """Note what is free on the disk, of which `kept_nbytes` are for others."""
        on_disk = sum(segment.physical_nbytes for segment in self.segments)
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
        current = self.segments.current
        if current is not None and current.end + size > self.segment_nbytes:
            current = None
        cost = size + FOOTER_RECORD_NBYTES_MAX + (SEGMENT_OVERHEAD_NBYTES if current is None else 0)
        if not is_tombstone and cost > self.available_nbytes:
            return None
        segment = current or self.segments.roll_over()
        extent = FileExtent(segment.tag.number, segment.end, size)
        segment.frames[segment.end] = PlacedFrame(size, is_tombstone)
        segment.end += size
        segment.placed += 1
        segment.pending += 1
        segment.runs += not is_tombstone
        self.segments.charge(segment, set_aside=size)
        return extent

    def find(self, extent: FileExtent) -> tuple[Segment, PlacedFrame]:
        """Return the frame at `extent` and its segment.

        Raises InvalidRequest if it was freed or never allocated.
        """
        found = self.segments.look_up(extent)
        if found is None or found[1].nbytes != extent.nbytes:
            raise InvalidRequest(f"{extent} is not allocated")
        return found

    def encoded(
        self, extent: FileExtent, header: FrameHeader, page: memoryview, *, sealed: bool
    ) -> None:
        """Note what will be written at `extent`, and its header page; sealed: which the writing
        thread fills."""
        segment, frame = self.find(extent)
        frame.page, frame.frame_nbytes = page, header.nbytes
        if sealed:
            frame.header = header
        else:
            frame.packed = pack_header(page)
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
        self.segments.charge(segment, set_aside=-frame.nbytes)
        self.measured(segment, measured)

    def is_lost(self, extent: FileExtent) -> bool:
        """Say whether a written frame was in an fdatasync that failed, or not in any yet."""
        found = self.segments.look_up(extent)
        return found is not None and found[1].write > found[0].writes_durable

    def measured(self, segment: Segment, measured: Measured) -> None:
        """Note the size of a file. A measurement that began before the last one changes nothing."""
        if measured.order > segment.measured_order:
            segment.measured_order = measured.order
            self.segments.charge(
                segment, physical=measured.physical_nbytes - segment.physical_nbytes
            )

    def free(self, extent: FileExtent) -> None:
        """Free a range. Raises InvalidRequest if it is unknown or being written."""
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
            self.segments.charge(segment, set_aside=-frame.nbytes)
        else:
            left = frame.nbytes if frame.state is State.FAILED else 0
            self.add_hole(segment, Hole(extent.offset, extent.nbytes, left))

    def add_hole(self, segment: Segment, hole: Hole) -> None:
        """Queue a range for punching."""
        segment.holes.append(hole)
        self.freeing_nbytes += hole.nbytes

    def take_holes(self, segment: Segment) -> list[Hole]:
        """Return the queued holes, neighbours merged. Call `punched` when done, or on failure."""
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
        """Stop counting holes that were punched or have failed. Call `measured` first."""
        self.freeing_nbytes -= sum(hole.nbytes for hole in holes)
        self.segments.charge(segment, set_aside=-sum(hole.set_aside_nbytes for hole in holes))

    def abandon(self) -> None:
        """Forget every range that was set aside and not written, and take no more frames."""
        for segment in list(self.segments.unclosed.values()):
            for offset, frame in list(segment.frames.items()):
                if frame.state in (State.SET_ASIDE, State.FAILED):
                    self.free(FileExtent(segment.tag.number, offset, frame.nbytes))
            self.segments.retire(segment)

    def remove(self, segment: Segment) -> None:
        """Forget a segment whose file is durably gone."""
        self.freeing_nbytes -= sum(hole.nbytes for hole in segment.holes)
        self.segments.remove(segment)
