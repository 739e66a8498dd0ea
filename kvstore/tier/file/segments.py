"""The segments of one directory, from open to unlinked, and the bytes they take. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

from kvstore.format.frame import NO_SEQUENCE, SegmentTag
from kvstore.tier.file.disk import Sizes
from kvstore.tier.file.segment import FileExtent, FramePlace, Phase, PlacedFrame, Segment


class Segments:
    """Iterate over it for all segments, oldest number first.

    physical_nbytes: measured and set aside, over all segments. expected: returns the lowest
    sequence of a run that has a number, and no frame in this directory yet.
    """

    def __init__(self) -> None:
        self.current: Segment | None = None  # takes the next frame
        self.unclosed: dict[int, Segment] = {}
        self.physical_nbytes = 0
        self.expected: Callable[[], int] = lambda: NO_SEQUENCE
        self._by_number: dict[int, Segment] = {}
        self._next_number = 1

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_number.values())

    def __getitem__(self, number: int) -> Segment:
        return self._by_number[number]

    def look_up(self, extent: FileExtent) -> tuple[Segment, PlacedFrame] | None:
        """Return the frame at `extent` and its segment; None if it was freed or never allocated."""
        segment = self._by_number.get(extent.segment)
        frame = segment.frames.get(extent.offset) if segment is not None else None
        return (segment, frame) if segment is not None and frame is not None else None

    @property
    def hold_runs(self) -> bool:
        """Whether there is anything that could be freed."""
        return any(segment.runs for segment in self)

    @property
    def not_durable(self) -> set[FramePlace]:
        """Where frames are, or were, that no fdatasync is known to have covered."""
        return {
            FramePlace(segment.tag, offset) for segment in self for offset in segment.not_durable
        }

    def add(self, segment: Segment, sizes: Sizes) -> None:
        """Take in a segment found on disk, with its frames."""
        self._by_number[segment.tag.number] = segment
        if segment.phase is not Phase.CLOSED:
            self.unclosed[segment.tag.number] = segment
        self._next_number = max(self._next_number, segment.tag.number + 1)
        self.charge(segment, physical=sizes.physical_nbytes)

    def roll_over(self) -> Segment:
        """Retire the current segment and return a new one."""
        if self.current is not None:
            self.retire(self.current)
        segment = Segment(SegmentTag(self._next_number, secrets.randbits(64)))
        self._next_number += 1
        self._by_number[segment.tag.number] = self.unclosed[segment.tag.number] = segment
        self.current = segment
        return segment

    def retire(self, segment: Segment) -> None:
        """Take no more frames into `segment`."""
        if segment.phase is Phase.OPEN:
            segment.phase = Phase.FULL
        if self.current is segment:
            self.current = None

    def sealable(self) -> list[Segment]:
        """Return full segments that wait for their footer. Dead ones are unlinked instead."""
        full = [s for s in self.unclosed.values() if s.phase is Phase.FULL and not s.pending]
        return [s for s in full if s.runs or self.is_needed(s)]

    def closed(self, segment: Segment) -> None:
        """Note that `segment` got its footer, or never will."""
        segment.phase = Phase.CLOSED
        self.unclosed.pop(segment.tag.number, None)
        for frame in segment.frames.values():
            frame.packed = b""

    def unlinkable(self) -> list[Segment]:
        """Return segments that no longer hold anything."""
        return [
            segment
            for segment in self
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
            other.run_sequence_min < newest for other in self if other is not segment
        )

    def remove(self, segment: Segment) -> None:
        """Forget a segment whose file is durably gone."""
        self.charge(segment, physical=-segment.physical_nbytes, set_aside=-segment.set_aside_nbytes)
        self.unclosed.pop(segment.tag.number, None)
        del self._by_number[segment.tag.number]

    def charge(self, segment: Segment, *, physical: int = 0, set_aside: int = 0) -> None:
        """Count bytes that a segment takes, or no longer takes."""
        segment.physical_nbytes += physical
        segment.set_aside_nbytes += set_aside
        self.physical_nbytes += physical + set_aside
