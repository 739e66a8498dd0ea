"""A segment file and the frames in it: what is known about them in memory. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvstore.format.frame import (
    FOOTER_RECORD_NBYTES_MAX,
    NO_SEQUENCE,
    FrameHeader,
    SegmentKey,
    SegmentTag,
)
from kvstore.model.block import PAGE_NBYTES, padded

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
    CLOSED = auto()  # sealed, or left without a footer: the next start scans it


@dataclass(slots=True)
class PlacedFrame:
    """A frame that was not freed.

    frame_nbytes: encoded size, at most nbytes; the rest of the extent stays a hole.
    packed: the header for the footer, until the segment closes. page: the header page, until the
    frame is written. write: its number among the segment's writes; 0 for a frame found on disk.
    """

    nbytes: int
    is_tombstone: bool
    state: State = State.SET_ASIDE
    frame_nbytes: int = 0
    packed: bytes = b""
    page: memoryview | None = None
    header: FrameHeader | None = None  # of a frame to be sealed, until it is written
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
    writes_synced: int = 0  # durable, or a caller was told that they are not
    writes_durable: int = 0
    sync_failures: int = 0  # what was written before one may be gone: such a file gets no footer
    given_up: set[int] = field(default_factory=set)  # offsets of frames freed before durable
    key: SegmentKey | None = None  # seals its frames; set when the file is created or found
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)  # create, sync, seal, one at a time

    @property
    def overhead_nbytes(self) -> int:
        """Bytes that closing this segment may still add to the file."""
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


def chunks(header: FrameHeader, positions: Sequence[int], nbytes_max: int) -> Iterator[list[int]]:
    """Yield consecutive blocks of a run that are read or written at once: so many bytes, or one."""
    chunk: list[int] = []
    nbytes = 0
    for position in positions:
        size = padded(header.blocks[position].stored_nbytes)
        if chunk and nbytes + size > nbytes_max:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(position)
        nbytes += size
    if chunk:
        yield chunk
