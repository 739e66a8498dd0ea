from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import (
    FOOTER_RECORD_NBYTES_MAX,
    FrameHeader,
    SegmentTag,
    Trailer,
    encode_footer,
    encode_header,
    encode_segment_header,
    pack_header,
    parse_footer,
    parse_segment_header,
    parse_trailer,
)
from kvstore.format.frame.page import guard
from kvstore.model.errors import Incompatible
from tests.format.frame.strategies import HEADERS, TAGS
from tests.format.frame.test_header import GOLDEN, KEYS_TOMBSTONE, RUN, TAG

FRAMES = [(4096, RUN), (4096 + RUN.nbytes, KEYS_TOMBSTONE)]
END = 4096 + RUN.nbytes + 4096


def footer_of(tag: SegmentTag, frames: list[tuple[int, FrameHeader]], end: int) -> bytes:
    packed = [pack_header(encode_header(header, tag, offset)) for offset, header in frames]
    return encode_footer(tag, end, packed, 42)


def parsed(data: bytes, tag: SegmentTag) -> list[tuple[int, FrameHeader]] | None:
    trailer = parse_trailer(data[-4096:], tag)
    return parse_footer(data[: trailer.footer_nbytes], trailer, tag) if trailer else None


def test_the_bytes_of_a_segment_header_never_change() -> None:
    golden = (GOLDEN / "segment_header.bin").read_bytes()
    assert encode_segment_header(TAG) == golden
    assert parse_segment_header(golden) == TAG


def test_the_bytes_of_a_footer_never_change() -> None:
    golden = (GOLDEN / "footer.bin").read_bytes()
    assert footer_of(TAG, FRAMES, END) == golden
    assert parsed(golden, TAG) == FRAMES
    trailer = parse_trailer(golden[-4096:], TAG)
    assert trailer is not None
    assert (trailer.run_sequence_min, trailer.file_nbytes) == (42, END + len(golden))


@given(TAGS, st.lists(HEADERS, max_size=4))
def test_a_footer_lists_what_was_put_in(tag: SegmentTag, headers: list[FrameHeader]) -> None:
    frames, position = [], 4096
    for header in headers:
        frames.append((position, header))
        position += header.nbytes
    footer = footer_of(tag, frames, position)
    assert len(footer) % 4096 == 0
    assert len(footer) <= len(headers) * FOOTER_RECORD_NBYTES_MAX + 8192
    assert parsed(footer, tag) == frames


@given(st.integers(0, 8191), st.integers(1, 255))
def test_a_changed_byte_of_footer_or_trailer_is_rejected_or_in_the_filling(
    at: int, flip: int
) -> None:
    data = bytearray(footer_of(TAG, FRAMES, END))
    assert len(data) == 8192
    trailer = parse_trailer(bytes(data[-4096:]), TAG)
    assert trailer is not None
    data[at] ^= flip
    in_filling = trailer.footer_nbytes <= at < 4096
    assert parsed(bytes(data), TAG) == (FRAMES if in_filling else None)


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_no_segment_pages(data: bytes) -> None:
    assert parse_segment_header(data) is None
    assert parse_trailer(data, TAG) is None


@given(st.binary(max_size=500), st.integers(0, 10))
def test_an_arbitrary_footer_with_a_right_checksum_never_raises(body: bytes, frames: int) -> None:
    from kvstore.model.checksum import checksum

    trailer = Trailer(1 << 20, len(body), frames, checksum(body), 1)
    found = parse_footer(body, trailer, TAG)
    assert found is None or (not body and not frames)


@given(st.binary(max_size=4088))
def test_an_arbitrary_trailer_with_a_right_checksum_never_raises(body: bytes) -> None:
    real = footer_of(TAG, FRAMES, END)[-4096:]
    for page in (body, real[:32] + body[32:]):
        trailer = parse_trailer(guard(page[:4088], TAG.nonce), TAG)
        assert trailer is None or trailer.footer_offset % 4096 == 0


def test_another_format_version_is_said_not_guessed() -> None:
    body = bytearray(encode_segment_header(TAG)[:4088])
    struct.pack_into("<H", body, 8, 3)
    with pytest.raises(Incompatible, match="segment format 3"):
        parse_segment_header(guard(bytes(body), 0))


def test_the_footer_of_another_segment_is_no_footer() -> None:
    assert parse_trailer(footer_of(TAG, FRAMES, END)[-4096:], TAG._replace(number=8)) is None


def test_a_frame_beyond_the_footer_spoils_it() -> None:
    assert parsed(footer_of(TAG, FRAMES, END - 4096), TAG) is None
