"""Read a segment back: through its footer where there is one, else page by page, verifying all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.block import PAGE_NBYTES, padded
from kvstore.checksum import checksum
from kvstore.errors import ConfigError, Incompatible
from kvstore.frame import (
    NO_SEQUENCE,
    FrameHeader,
    SegmentTag,
    Trailer,
    encode_header,
    pack_header,
    parse_footer,
    parse_header,
    parse_segment_header,
    parse_trailer,
)
from kvstore.frame.header import MAGIC as FRAME_MAGIC
from kvstore.tier.file.disk import Disk, Sizes
from kvstore.tier.file.failure import disk_errors
from kvstore.tier.file.live import live_positions
from kvstore.tier.file.pages import aligned_buffer
from kvstore.tier.file.segment_file import SegmentFiles, transfer
from kvstore.tier.file.space import FileExtent, Hole, Phase, PlacedFrame, Segment, State

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrameRecord:
    """A run found on disk. live: positions of the blocks to serve, ascending, at least one."""

    location: FileExtent
    header: FrameHeader
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `open` found: runs in the order they were written, and where numbering goes on.

    dropped_frames: torn or rotten, found in scans. Rot in sealed segments shows when it is read.
    """

    frames: list[FrameRecord]
    next_sequence: int
    dropped_frames: int
    scan_s: float


@dataclass(slots=True)
class LoadedSegment:
    """A segment as found. sealed: its footer is good; else gaps: the ranges without a frame."""

    tag: SegmentTag
    sizes: Sizes
    frames: list[tuple[int, FrameHeader]] = field(default_factory=list)
    sealed: bool = False
    dropped: int = 0
    run_sequence_min: int = NO_SEQUENCE
    sequence_max: int = 0
    gaps: list[Hole] = field(default_factory=list)

    def saw(self, header: FrameHeader) -> None:
        """Count a header's sequence, be its payload good or not."""
        self.sequence_max = max(self.sequence_max, header.sequence)
        if not header.is_tombstone:
            self.run_sequence_min = min(self.run_sequence_min, header.sequence)


def load_segment(files: SegmentFiles, tag: SegmentTag) -> LoadedSegment:
    """Read one segment. Blocking. What a scan found is durable when this returns.

    Raises Incompatible for another format version, ConfigError for a renamed file, DiskFailed.
    """
    return _load(files, tag, write=True)


def look_at_segment(files: SegmentFiles, tag: SegmentTag) -> LoadedSegment:
    """The same for one that somebody else may be using: nothing is written, nothing synced."""
    return _load(files, tag, write=False)


def _load(files: SegmentFiles, tag: SegmentTag, *, write: bool) -> LoadedSegment:
    disk = files.disk
    with disk_errors(f"recover {files.path(tag).name}"):
        fd = disk.open(files.path(tag), write=write)
        try:
            reader = _Reader(disk, fd)
            loaded = LoadedSegment(tag, disk.sizes(fd))
            _check_identity(reader, tag, files)
            if not _load_footer(reader, loaded):
                _scan(reader, loaded)
                if write:
                    disk.fdatasync(fd)
            return loaded
        finally:
            disk.close(fd)


def live_records(segments: Sequence[LoadedSegment]) -> tuple[list[FrameRecord], list[FileExtent]]:
    """Return the runs with live blocks, by sequence, and the extents of all other runs."""
    placed = [
        (header, FileExtent(segment.tag.number, offset, header.nbytes))
        for segment in segments
        for offset, header in segment.frames
    ]
    placed.sort(key=lambda item: (item[0].sequence, item[1]))
    records: list[FrameRecord] = []
    dead: list[FileExtent] = []
    headers = [header for header, _ in placed]
    for (header, extent), live in zip(placed, live_positions(headers), strict=True):
        if live:
            records.append(FrameRecord(extent, header, live))
        elif not header.is_tombstone:
            dead.append(extent)
    return records, dead


def adopted(loaded: LoadedSegment) -> Segment:
    """Return the bookkeeping of a segment found on disk. Unsealed ones will get their footer."""
    segment = Segment(
        loaded.tag,
        phase=Phase.CLOSED if loaded.sealed else Phase.FULL,
        end=padded(loaded.sizes.nbytes),
        placed=len(loaded.frames),
        run_sequence_min=loaded.run_sequence_min,
    )
    for offset, header in loaded.frames:
        frame = PlacedFrame(header.nbytes, header.is_tombstone, State.WRITTEN)
        if not loaded.sealed:
            frame.packed = pack_header(encode_header(header, loaded.tag, offset))
        if header.is_tombstone:
            segment.tombstone_sequence_max = max(segment.tombstone_sequence_max, header.sequence)
        else:
            segment.runs += 1
        segment.frames[offset] = frame
    return segment


class _Reader:
    """Reads that answer None where the device or the file's end refuses them."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self.disk = disk
        self.fd = fd
        self._buffer = aligned_buffer(PAGE_NBYTES)

    def read(self, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes that stay valid until the next call."""
        if len(self._buffer) < nbytes:
            self._buffer = aligned_buffer(nbytes)
        target = self._buffer[:nbytes]
        try:
            moved = transfer(self.disk.preadv, self.fd, [target], offset)
        except OSError as error:
            _log.warning("unreadable offset=%d nbytes=%d error=%s", offset, nbytes, error)
            return None
        return target if moved == nbytes else None


def _check_identity(reader: _Reader, tag: SegmentTag, files: SegmentFiles) -> None:
    page = reader.read(0, PAGE_NBYTES)
    path = files.path(tag)
    try:
        found = parse_segment_header(page) if page is not None else None
    except Incompatible as error:
        raise Incompatible(
            f"{path}: {error}. Run the release that wrote it, or remove the directory's segments "
            "to start with an empty tier"
        ) from error
    if found is not None and found != tag:
        raise ConfigError(f"{path} was renamed or copied from another place: move it away")


def _load_footer(reader: _Reader, loaded: LoadedSegment) -> bool:
    size = loaded.sizes.nbytes
    if size % PAGE_NBYTES or size < 2 * PAGE_NBYTES:
        return False
    page = reader.read(size - PAGE_NBYTES, PAGE_NBYTES)
    trailer = parse_trailer(page, loaded.tag) if page is not None else None
    if trailer is None or trailer.file_nbytes != size:
        return False
    frames = _footer_frames(reader, trailer, loaded.tag)
    if frames is None:
        return False
    for offset, header in frames:
        loaded.saw(header)
        # Evicted since the footer was written: the header page is a hole.
        if reader.disk.next_data(reader.fd, offset) == offset:
            loaded.frames.append((offset, header))
    loaded.run_sequence_min = trailer.run_sequence_min
    loaded.sealed = True
    return True


def _footer_frames(
    reader: _Reader, trailer: Trailer, tag: SegmentTag
) -> list[tuple[int, FrameHeader]] | None:
    body = reader.read(trailer.footer_offset, trailer.footer_nbytes)
    return parse_footer(body, trailer, tag) if body is not None else None


def _scan(reader: _Reader, loaded: LoadedSegment) -> None:
    """Find frames page by page. After a bad one, go on at the next page that is a header."""
    end = padded(loaded.sizes.nbytes)
    position = free = PAGE_NBYTES
    while position < end:
        data = reader.disk.next_data(reader.fd, position)
        if data is None:
            break
        position = max(position, data // PAGE_NBYTES * PAGE_NBYTES)
        header = _scan_frame(reader, loaded, position)
        if header is None:
            position += PAGE_NBYTES
            continue
        loaded.frames.append((position, header))
        if free < position:
            loaded.gaps.append(Hole(free, position - free))
        position = free = position + header.nbytes
    if free < end:
        loaded.gaps.append(Hole(free, end - free))


def _scan_frame(reader: _Reader, loaded: LoadedSegment, offset: int) -> FrameHeader | None:
    page = reader.read(offset, PAGE_NBYTES)
    if page is None:
        return None
    header = parse_header(page, loaded.tag, offset)
    if header is None:
        loaded.dropped += page[: len(FRAME_MAGIC)] == FRAME_MAGIC
        return None
    loaded.saw(header)
    if _payload_is_good(reader, header, offset):
        return header
    loaded.dropped += 1
    return None


def _payload_is_good(reader: _Reader, header: FrameHeader, offset: int) -> bool:
    for start, block in zip(header.offsets, header.blocks, strict=True):
        stored = reader.read(offset + start, block.stored_nbytes)
        if stored is None or checksum(stored) != block.stored_checksum:
            return False
    return True
