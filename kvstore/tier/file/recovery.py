"""Read a segment back: from its footer if it has one, else page by page, verifying each frame.

Headers stay packed: a start gets what it needs of all of them without parsing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.format.frame import (
    NO_SEQUENCE,
    FrameHeader,
    PackedFrames,
    SegmentKey,
    SegmentTag,
    open_block,
    pack_header,
    packed_footer,
    parse_header,
    parse_segment_header,
    parse_trailer,
    sealed_place,
    segment_keys,
)
from kvstore.format.frame.header import MAGIC as FRAME_MAGIC
from kvstore.format.frame.header import PLAIN, SEALED, plain_page
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import ConfigError, Incompatible
from kvstore.tier.file.disk import Sizes
from kvstore.tier.file.failure import disk_errors
from kvstore.tier.file.segment import Hole, Phase, PlacedFrame, Segment, State, chunks
from kvstore.tier.file.segment_file import SegmentFiles
from kvstore.tier.file.segment_form import Form, Reader, clear_trailer_of, find_form

READ_NBYTES = 1 << 20  # of blocks that are verified at once
AHEAD_NBYTES = 512 << 10  # read at once by a scan: several small frames
SMALL_NBYTES = 16 << 10  # blocks up to this are verified by Python more than by native code
# Held by the one thread that verifies small blocks. Several would hand the interpreter's lock to
# each other at every block, and take twice as long.
_SCANNING = threading.Lock()

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedSegment:
    """A segment as found. sealed: its footer is good; else gaps: the ranges without a frame.

    refused: reads that failed with an I/O error; those frames count as torn. encrypted: it is
    sealed with a key. key: that, if it is known; without it no frame is, and those that are where
    they say count as dropped. needs_epoch: of the tenant's key, as its file says.
    """

    tag: SegmentTag
    sizes: Sizes
    frames: PackedFrames
    sealed: bool = False
    dropped: int = 0
    refused: int = 0
    run_sequence_min: int = NO_SEQUENCE
    sequence_max: int = 0
    gaps: list[Hole] = field(default_factory=list)
    encrypted: bool = False
    key: SegmentKey | None = None
    needs_epoch: int | None = None

    @property
    def locked(self) -> bool:
        """Whether its key is not known."""
        return self.encrypted and self.key is None

    @property
    def tombstones(self) -> list[FrameHeader]:
        """The tombstones in it, parsed."""
        return [
            header
            for index in np.flatnonzero(self.frames.blocks == 0).tolist()
            if (header := self.frames.header(index)) is not None
        ]

    def saw(self, header: FrameHeader) -> None:
        """Count a header's sequence, whether or not its payload is good."""
        self.sequence_max = max(self.sequence_max, header.sequence)
        if not header.is_tombstone:
            self.run_sequence_min = min(self.run_sequence_min, header.sequence)


def load_segment(files: SegmentFiles, tag: SegmentTag) -> LoadedSegment:
    """Read one segment. Blocking. Frames that a scan found are durable when this returns.

    Raises Incompatible for another format version, ConfigError for a renamed file or one that needs
    other keys, DiskFailed.
    """
    return _load(files, tag, write=True)


def look_at_segment(files: SegmentFiles, tag: SegmentTag) -> LoadedSegment:
    """Read a segment that a daemon may be using: nothing is written or synced."""
    return _load(files, tag, write=False)


def _load(files: SegmentFiles, tag: SegmentTag, *, write: bool) -> LoadedSegment:
    disk = files.disk
    with disk_errors(f"recover {files.path(tag).name}"):
        fd = disk.open(files.path(tag), write=write)
        try:
            reader = Reader(disk, fd)
            sizes = disk.sizes(fd)
            page = _check_identity(reader, tag, files)
            form = find_form(reader, tag, files, sizes, page, write=write)
            loaded = _load_frames(reader, tag, sizes, form)
            if not loaded.sealed and write:
                disk.fdatasync(fd)
            loaded.refused = reader.refused
            return loaded
        finally:
            disk.close(fd)


def holds_sealed(files: SegmentFiles, tags: Sequence[SegmentTag]) -> bool:
    """Say whether any of some segments is encrypted, as its first page says. Raises DiskFailed."""
    for tag in tags:
        with disk_errors(f"look at {files.path(tag).name}"):
            fd = files.disk.open(files.path(tag))
            try:
                page = Reader(files.disk, fd).read(0, PAGE_NBYTES)
            finally:
                files.disk.close(fd)
        if page is not None and segment_keys(page):
            return True
    return False


def adopted(loaded: LoadedSegment) -> Segment:
    """Return the bookkeeping of a segment found on disk. Unsealed ones will get their footer."""
    frames = loaded.frames
    segment = Segment(
        loaded.tag,
        phase=Phase.CLOSED if loaded.sealed else Phase.FULL,
        end=padded(loaded.sizes.nbytes),
        placed=len(frames),
        runs=int(np.count_nonzero(frames.blocks)),
        run_sequence_min=loaded.run_sequence_min,
        tombstone_sequence_max=max((h.sequence for h in loaded.tombstones), default=0),
        key=loaded.key,
    )
    columns = (frames.offsets.tolist(), frames.nbytes.tolist(), frames.blocks.tolist())
    for index, (offset, nbytes, blocks) in enumerate(zip(*columns, strict=True)):
        frame = segment.frames[offset] = PlacedFrame(nbytes, not blocks, State.WRITTEN)
        if not loaded.sealed:
            frame.packed = frames.packed(index)
    return segment


def _load_frames(reader: Reader, tag: SegmentTag, sizes: Sizes, form: Form) -> LoadedSegment:
    if form.lost:
        loaded = _count_locked(reader, tag, sizes)
        loaded.needs_epoch = form.epoch
        return loaded
    loaded = _load_footer(reader, tag, sizes, form.key) or _scan(reader, tag, sizes, form.key)
    loaded.encrypted, loaded.key, loaded.needs_epoch = form
    return loaded


def _count_locked(reader: Reader, tag: SegmentTag, sizes: Sizes) -> LoadedSegment:
    """Return a segment without a key: how many frames are where they say, and no more."""
    clear = clear_trailer_of(reader, tag, sizes)
    loaded = LoadedSegment(tag, sizes, PackedFrames(b"", tag), encrypted=True)
    loaded.sealed = clear is not None and clear.file_nbytes == sizes.nbytes
    position, end = PAGE_NBYTES, padded(sizes.nbytes)
    loaded.gaps.append(Hole(PAGE_NBYTES, max(0, end - PAGE_NBYTES)))
    while position < end:
        data = reader.disk.next_data(reader.fd, position)
        if data is None:
            break
        position = max(position, data // PAGE_NBYTES * PAGE_NBYTES)
        page = reader.read(position, PAGE_NBYTES)
        loaded.dropped += page is not None and sealed_place(page) == (tag.number, position)
        position += PAGE_NBYTES
    return loaded


def _check_identity(reader: Reader, tag: SegmentTag, files: SegmentFiles) -> bytes:
    """Return page 0, nothing if it cannot be read. Raises Incompatible, ConfigError."""
    page = bytes(reader.read(0, PAGE_NBYTES) or b"")
    path = files.path(tag)
    try:
        found = parse_segment_header(page)
    except Incompatible as error:
        raise Incompatible(
            f"{path}: {error}. Run the release that wrote it, or remove the directory's segments "
            "to start with an empty tier"
        ) from error
    if found is not None and found != tag:
        raise ConfigError(f"{path} was renamed or copied from another place: move it away")
    return page


def _load_footer(
    reader: Reader, tag: SegmentTag, sizes: Sizes, key: SegmentKey | None
) -> LoadedSegment | None:
    size = sizes.nbytes
    if size % PAGE_NBYTES or size < 2 * PAGE_NBYTES:
        return None
    page = reader.read(size - PAGE_NBYTES, PAGE_NBYTES)
    trailer = parse_trailer(page, tag, key) if page is not None else None
    if trailer is None or trailer.file_nbytes != size:
        return None
    body = reader.read(trailer.footer_offset, trailer.footer_nbytes)
    listed = packed_footer(body, trailer, tag, key) if body is not None else None
    if listed is None:
        return None
    return LoadedSegment(
        tag,
        sizes,
        listed.where(_still_there(reader, listed, size, key)),
        sealed=True,
        run_sequence_min=trailer.run_sequence_min,
        sequence_max=int(listed.sequences.max(initial=0)),
    )


def _still_there(
    reader: Reader, listed: PackedFrames, end: int, key: SegmentKey | None
) -> npt.NDArray[np.bool_]:
    """Say of each frame of a footer whether it is in the file: (frames,).

    The header page of a frame freed since the footer was written is a hole. A power cut may leave
    that page and take others. So a frame with a hole inside is verified: it must not hide an older
    copy of its blocks. (File systems that store no zeros have holes in whole frames, too.)
    """
    starts, ends, at = [], [], 0
    while at < end and (data := reader.disk.next_data(reader.fd, at)) is not None:
        at = reader.disk.next_hole(reader.fd, data)
        starts.append(data)
        ends.append(at)
    if not starts:
        return np.zeros(len(listed), np.bool_)
    before = np.searchsorted(starts, listed.offsets, side="right") - 1
    data_end = np.where(before >= 0, np.array(ends)[before], 0)
    there: npt.NDArray[np.bool_] = listed.offsets < data_end
    for index in np.flatnonzero(there & (listed.offsets + listed.nbytes > data_end)).tolist():
        header, offset = listed.header(index), int(listed.offsets[index])
        there[index] = header is not None and _payload_is_good(reader, header, offset, key)
    return there


def _scan(reader: Reader, tag: SegmentTag, sizes: Sizes, key: SegmentKey | None) -> LoadedSegment:
    """Find frames page by page. After a bad one, go on at the next page that is a header."""
    reader.ahead_nbytes = AHEAD_NBYTES
    with _SCANNING:
        reader.turn = _SCANNING
        try:
            return _scan_in_turn(reader, tag, sizes, key)
        finally:
            reader.turn = None


def _scan_in_turn(
    reader: Reader, tag: SegmentTag, sizes: Sizes, key: SegmentKey | None
) -> LoadedSegment:
    loaded = LoadedSegment(tag, sizes, PackedFrames(b"", tag))
    found: list[bytes] = []
    end = padded(sizes.nbytes)
    position = free = PAGE_NBYTES
    while position < end:
        header = _scan_frame(reader, loaded, position, key)
        if header is None:
            position = _next_page(reader, position + PAGE_NBYTES, end)
            continue
        layout = PLAIN if key is None else SEALED
        found.append(pack_header(plain_page(header, tag, position, layout)))
        if free < position:
            loaded.gaps.append(Hole(free, position - free))
        position = free = position + header.nbytes
    if free < end:
        loaded.gaps.append(Hole(free, end - free))
    loaded.frames = PackedFrames.of(found, tag, sealed=key is not None)
    return loaded


def _next_page(reader: Reader, position: int, end: int) -> int:
    """Return the first page from `position` on that is not in a hole; `end` if all are."""
    with reader.others_turn():
        data = reader.disk.next_data(reader.fd, position)
    return end if data is None else max(position, data // PAGE_NBYTES * PAGE_NBYTES)


def _scan_frame(
    reader: Reader, loaded: LoadedSegment, offset: int, key: SegmentKey | None
) -> FrameHeader | None:
    page = reader.read(offset, PAGE_NBYTES)
    if page is None:
        return None
    header = parse_header(page, loaded.tag, offset, key)
    if header is None:
        loaded.dropped += page[: len(FRAME_MAGIC)] == FRAME_MAGIC
        return None
    loaded.saw(header)
    if _payload_is_good(reader, header, offset, key):
        return header
    loaded.dropped += 1
    reader.forget()
    return None


def _payload_is_good(
    reader: Reader, header: FrameHeader, offset: int, key: SegmentKey | None
) -> bool:
    """Say whether all blocks of a frame are what was written. Reads several of them at once."""
    offsets = header.offsets
    for positions in chunks(header, range(len(offsets)), READ_NBYTES):
        first, last = offsets[positions[0]], positions[-1]
        nbytes = offsets[last] + header.blocks[last].stored_nbytes - first
        stored = reader.read(offset + first, nbytes)
        if stored is None:
            return False
        is_small = header.blocks[positions[0]].stored_nbytes <= SMALL_NBYTES
        with nullcontext() if is_small else reader.others_turn():
            for position in positions:
                if not _block_is_good(header, position, stored[offsets[position] - first :], key):
                    return False
    return True


def _block_is_good(
    header: FrameHeader, position: int, stored: memoryview, key: SegmentKey | None
) -> bool:
    block = header.blocks[position]
    if key is None:
        return checksum(stored[: block.stored_nbytes]) == block.stored_checksum
    # A tag that opens says what a checksum would. Who reads the block compares that, too.
    return open_block(header, position, key, stored)
