"""The pages around a segment's frames: its header, its footer. Layout: see the package."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.format.frame.header import FrameHeader
from kvstore.format.frame.packed import PACKED_NBYTES_MAX, PackedFrames, join_packed
from kvstore.format.frame.page import SEALED_VERSION, U64_MAX, SegmentTag, guard, is_guarded
from kvstore.format.frame.seal import (
    KEY_WRAPPED_NBYTES,
    PLAIN_BODY_NBYTES,
    SEAL_NBYTES,
    SegmentKey,
    WrappedKey,
    open_footer,
    open_page,
    seal_footer,
    seal_page,
)
from kvstore.model.block import FORMAT_VERSION, PAGE_NBYTES, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import Incompatible

SEGMENT_MAGIC = b"KVSEGMNT"
TRAILER_MAGIC = b"KVSTRAIL"
NO_SEQUENCE = U64_MAX
I64_MAX = (1 << 63) - 1

_HEADER = struct.Struct("<8sH6xQQ")
_TRAILER = struct.Struct("<8sH6xQQQQQQQ")
_SEALED_HEADER = struct.Struct(f"<8sH6xQQ16sI4x{KEY_WRAPPED_NBYTES}s")
# Once more, in another sector of the page: until a segment is closed, its key is nowhere else.
_KEY_COPY = struct.Struct(f"<8s16sI4x{KEY_WRAPPED_NBYTES}s")
_KEY_COPY_AT = 2048
_KEY_COPY_MAGIC = b"KVSEGKEY"
# In clear up to the size of the footer; the others are sealed.
_SEALED_TRAILER = struct.Struct(f"<8sH2xIQQ16s{KEY_WRAPPED_NBYTES}sQQQQQ{SEAL_NBYTES}s")
TRAILER_CLEAR_NBYTES = 104
FOOTER_RECORD_NBYTES_MAX = PACKED_NBYTES_MAX


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where a closed segment's footer is. run_sequence_min: NO_SEQUENCE if it never held a run.

    seal: of the footer, where it is encrypted; else empty.
    """

    footer_offset: int
    footer_nbytes: int
    frames: int
    footer_checksum: int
    run_sequence_min: int
    seal: bytes = b""

    @property
    def file_nbytes(self) -> int:
        """The size a file with this trailer has."""
        return self.footer_offset + padded(self.footer_nbytes) + PAGE_NBYTES


def encode_segment_header(tag: SegmentTag, key: SegmentKey | None = None) -> bytes:
    """Return page 0 of a segment, with the key that seals it, if any."""
    if key is None:
        return guard(_HEADER.pack(SEGMENT_MAGIC, FORMAT_VERSION, tag.number, tag.nonce), 0)
    tenant, epoch, wrapped = key.wrapped
    head = _SEALED_HEADER.pack(
        SEGMENT_MAGIC, SEALED_VERSION, tag.number, tag.nonce, tenant, epoch, wrapped
    )
    copy = _KEY_COPY.pack(_KEY_COPY_MAGIC, tenant, epoch, wrapped)
    return guard(head.ljust(_KEY_COPY_AT, b"\0") + copy, 0)


def parse_segment_header(page: bytes | memoryview) -> SegmentTag | None:
    """Return what page 0 says, None if it is damaged. Raises Incompatible on another version."""
    if not is_guarded(page, 0):
        return None
    magic, version, number, nonce = _HEADER.unpack_from(page)
    if magic != SEGMENT_MAGIC:
        return None
    if version not in (FORMAT_VERSION, SEALED_VERSION):
        raise Incompatible(
            f"segment format {version}; this release reads {FORMAT_VERSION} and {SEALED_VERSION}"
        )
    return SegmentTag(number, nonce)


def segment_keys(page: bytes | memoryview) -> list[WrappedKey]:
    """Return the copies of the key in page 0 of a sealed segment, which may be damaged: unwrapping
    tells which is good. None of them: it is a plain segment, or all is lost."""
    if len(page) != PAGE_NBYTES:
        return []
    found = []
    magic, version, _, _, *key = _SEALED_HEADER.unpack_from(page)
    if (magic, version) == (SEGMENT_MAGIC, SEALED_VERSION):
        found.append(WrappedKey(*key))
    magic, *key = _KEY_COPY.unpack_from(page, _KEY_COPY_AT)
    if magic == _KEY_COPY_MAGIC:
        found.append(WrappedKey(*key))
    return found


def encode_footer(
    tag: SegmentTag,
    offset: int,
    packed: Sequence[bytes],
    run_sequence_min: int,
    *,
    key: SegmentKey | None = None,
) -> bytes:
    """Return footer and trailer, whole pages, of a segment whose frames end at `offset`.

    packed: `pack_header` of the frames to keep. run_sequence_min: see Trailer. key: seals both.
    """
    body = join_packed(packed)
    if key is not None:
        return _sealed_footer(tag, (offset, len(body), len(packed)), body, run_sequence_min, key)
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


def _sealed_footer(
    tag: SegmentTag,
    place: tuple[int, int, int],
    body: bytes,
    run_sequence_min: int,
    key: SegmentKey,
) -> bytes:
    """place: offset and bytes of the footer, and its records."""
    sealed, seal = seal_footer(body, tag, key)
    tenant, epoch, wrapped = key.wrapped
    trailer = _SEALED_TRAILER.pack(
        TRAILER_MAGIC,
        SEALED_VERSION,
        epoch,
        tag.number,
        tag.nonce,
        tenant,
        wrapped,
        *place,
        checksum(body),
        run_sequence_min,
        seal,
    )
    page = seal_page(guard(trailer, tag.nonce, PLAIN_BODY_NBYTES), TRAILER_CLEAR_NBYTES, key)
    return sealed.ljust(padded(len(body)), b"\0") + page


def parse_trailer(
    page: bytes | memoryview, tag: SegmentTag, key: SegmentKey | None = None
) -> Trailer | None:
    """Return what the last page of the segment `tag` says; None if it is no trailer of it.

    key: of a sealed segment, in which nothing else counts as a trailer.
    """
    if key is not None:
        return _parse_sealed_trailer(page, tag, key)
    if not is_guarded(page, tag.nonce):
        return None
    magic, version, number, nonce, *fields = _TRAILER.unpack_from(page)
    if (magic, version, number, nonce) != (TRAILER_MAGIC, FORMAT_VERSION, *tag):
        return None
    return _checked(Trailer(*fields))


def _parse_sealed_trailer(
    page: bytes | memoryview, tag: SegmentTag, key: SegmentKey
) -> Trailer | None:
    plain = open_page(page, TRAILER_CLEAR_NBYTES, key)
    if plain is None or not is_guarded(plain, tag.nonce, PLAIN_BODY_NBYTES):
        return None
    magic, version, _, number, nonce, _, _, *fields = _SEALED_TRAILER.unpack_from(plain)
    if (magic, version, number, nonce) != (TRAILER_MAGIC, SEALED_VERSION, *tag):
        return None
    return _checked(Trailer(*fields))


def _checked(trailer: Trailer) -> Trailer | None:
    if trailer.footer_offset % PAGE_NBYTES or trailer.footer_offset < PAGE_NBYTES:
        return None
    if trailer.footer_nbytes > trailer.frames * FOOTER_RECORD_NBYTES_MAX:
        return None
    return trailer


class ClearTrailer(NamedTuple):
    """What the last page of a sealed segment says without its key. Nothing vouches for it."""

    key: WrappedKey
    file_nbytes: int


def clear_trailer(page: bytes | memoryview, tag: SegmentTag) -> ClearTrailer | None:
    """Return what may be read of the trailer of the sealed segment `tag`; None for another page."""
    if len(page) != PAGE_NBYTES:
        return None
    magic, version, epoch, number, nonce, tenant, wrapped, offset, nbytes, *_ = (
        _SEALED_TRAILER.unpack_from(page)
    )
    if (magic, version, number, nonce) != (TRAILER_MAGIC, SEALED_VERSION, *tag):
        return None
    return ClearTrailer(WrappedKey(tenant, epoch, wrapped), offset + padded(nbytes) + PAGE_NBYTES)


def packed_footer(
    body: bytes | memoryview, trailer: Trailer, tag: SegmentTag, key: SegmentKey | None = None
) -> PackedFrames | None:
    """Return the frames listed, not yet parsed, or None if `body` is no footer of this trailer."""
    if len(body) != trailer.footer_nbytes:
        return None
    plain = bytes(body) if key is None else open_footer(body, trailer.seal, tag, key)
    if plain is None or checksum(plain) != trailer.footer_checksum:
        return None
    try:
        frames = PackedFrames(plain, tag, sealed=key is not None)
    except ValueError:
        return None
    inside = (frames.offsets <= min(trailer.footer_offset, I64_MAX) - frames.nbytes).all()
    return frames if inside and len(frames) == trailer.frames else None


def parse_footer(
    body: bytes | memoryview, trailer: Trailer, tag: SegmentTag, key: SegmentKey | None = None
) -> list[tuple[int, FrameHeader]] | None:
    """Return (offset, header) of every frame listed, or None if anything in `body` is wrong."""
    frames = packed_footer(body, trailer, tag, key)
    headers = frames.headers() if frames is not None else []
    return headers if frames is not None and len(headers) == len(frames) else None
