"""The pages around a segment's frames: its header, its footer. Layout: see the package."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.format.frame.header import FrameHeader
from kvstore.format.frame.packed import PACKED_NBYTES_MAX, PackedFrames, join_packed
from kvstore.format.frame.page import U64_MAX, SegmentTag, guard, is_guarded
from kvstore.model.block import FORMAT_VERSION, PAGE_NBYTES, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import Incompatible

SEGMENT_MAGIC = b"KVSEGMNT"
TRAILER_MAGIC = b"KVSTRAIL"
NO_SEQUENCE = U64_MAX
I64_MAX = (1 << 63) - 1

_HEADER = struct.Struct("<8sH6xQQ")
_TRAILER = struct.Struct("<8sH6xQQQQQQQ")
FOOTER_RECORD_NBYTES_MAX = PACKED_NBYTES_MAX


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where a sealed segment's footer is. run_sequence_min: NO_SEQUENCE if it never held a run."""

    footer_offset: int
    footer_nbytes: int
    frames: int
    footer_checksum: int
    run_sequence_min: int

    @property
    def file_nbytes(self) -> int:
        """The size a file with this trailer has."""
        return self.footer_offset + padded(self.footer_nbytes) + PAGE_NBYTES


def encode_segment_header(tag: SegmentTag) -> bytes:
    """Return page 0 of a segment."""
    return guard(_HEADER.pack(SEGMENT_MAGIC, FORMAT_VERSION, tag.number, tag.nonce), 0)


def parse_segment_header(page: bytes | memoryview) -> SegmentTag | None:
    """Return what page 0 says, None if it is damaged. Raises Incompatible on another version."""
    if not is_guarded(page, 0):
        return None
    magic, version, number, nonce = _HEADER.unpack_from(page)
    if magic != SEGMENT_MAGIC:
        return None
    if version != FORMAT_VERSION:
        raise Incompatible(f"segment format {version}; this release reads {FORMAT_VERSION}")
    return SegmentTag(number, nonce)


def encode_footer(
    tag: SegmentTag, offset: int, packed: Sequence[bytes], run_sequence_min: int
) -> bytes:
    """Return footer and trailer, whole pages, of a segment whose frames end at `offset`.

    packed: `pack_header` of the frames to keep. run_sequence_min: see Trailer.
    """
    body = join_packed(packed)
    trailer = _TRAILER.pack(
        TRAILER_MAGIC,
        FORMAT_VERSION,
        tag.number,
        tag.nonce,
        offset,
        len(body),
        len(packed),
        checksum(body),
        run_sequence_min,
    )
    return body.ljust(padded(len(body)), b"\0") + guard(trailer, tag.nonce)


def parse_trailer(page: bytes | memoryview, tag: SegmentTag) -> Trailer | None:
    """Return what the last page of the segment `tag` says; None if it is no trailer of it."""
    if not is_guarded(page, tag.nonce):
        return None
    magic, version, number, nonce, *fields = _TRAILER.unpack_from(page)
    if (magic, version, number, nonce) != (TRAILER_MAGIC, FORMAT_VERSION, *tag):
        return None
    trailer = Trailer(*fields)
    if trailer.footer_offset % PAGE_NBYTES or trailer.footer_offset < PAGE_NBYTES:
        return None
    if trailer.footer_nbytes > trailer.frames * FOOTER_RECORD_NBYTES_MAX:
        return None
    return trailer


def packed_footer(
    body: bytes | memoryview, trailer: Trailer, tag: SegmentTag
) -> PackedFrames | None:
    """Return the frames listed, not yet parsed, or None if `body` is no footer of this trailer."""
    if len(body) != trailer.footer_nbytes or checksum(body) != trailer.footer_checksum:
        return None
    try:
        frames = PackedFrames(bytes(body), tag)
    except ValueError:
        return None
    inside = (frames.offsets <= min(trailer.footer_offset, I64_MAX) - frames.nbytes).all()
    return frames if inside and len(frames) == trailer.frames else None


def parse_footer(
    body: bytes | memoryview, trailer: Trailer, tag: SegmentTag
) -> list[tuple[int, FrameHeader]] | None:
    """Return (offset, header) of every frame listed, or None if anything in `body` is wrong."""
    frames = packed_footer(body, trailer, tag)
    headers = frames.headers() if frames is not None else []
    return headers if frames is not None and len(headers) == len(frames) else None
