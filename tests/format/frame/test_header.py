from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import (
    FrameHeader,
    FrameKind,
    RunBlock,
    SegmentTag,
    encode_header,
    parse_header,
)
from kvstore.format.frame.page import guard
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.model.errors import InvalidRequest
from tests.format.frame.strategies import HEADERS, OFFSETS, TAGS

GOLDEN = Path(__file__).parent / "golden"
TAG = SegmentTag(number=7, nonce=0x1122334455667788)
OFFSET = 3 * 4096
RUN = FrameHeader(
    kind=FrameKind.RUN,
    sequence=42,
    namespace_id=NamespaceId(bytes(range(32))),
    part=Part(3, 5),
    first_block=160,
    parent=BlockKey(b"p" * 32),
    blocks=(
        RunBlock(BlockKey(b"a" * 32), 20_000, 9_000, 0x0102030405060708, 0x1112131415161718),
        RunBlock(BlockKey(b"b" * 32), 20_000, 20_100, 0x2122232425262728, 0x3132333435363738),
    ),
    codec_id=1,
    tenant=b"t" * 16,
)
KEYS_TOMBSTONE = FrameHeader(
    kind=FrameKind.TOMBSTONE_KEYS,
    sequence=43,
    namespace_id=NamespaceId(bytes(range(32))),
    killed=(BlockKey(b"a" * 32), BlockKey(b"b" * 32)),
)
NAMESPACE_TOMBSTONE = FrameHeader(
    kind=FrameKind.TOMBSTONE_NAMESPACE,
    sequence=44,
    namespace_id=NamespaceId(bytes(range(32))),
)
GOLDEN_HEADERS = {
    "run": RUN,
    "tombstone_keys": KEYS_TOMBSTONE,
    "tombstone_namespace": NAMESPACE_TOMBSTONE,
}


@pytest.mark.parametrize("name", GOLDEN_HEADERS)
def test_the_bytes_of_a_header_never_change(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert encode_header(GOLDEN_HEADERS[name], TAG, OFFSET) == golden
    assert parse_header(golden, TAG, OFFSET) == GOLDEN_HEADERS[name]


def test_blocks_stand_on_page_boundaries_one_after_the_other() -> None:
    assert RUN.offsets == (4096, 4096 + 12_288)
    assert RUN.nbytes == 4096 + 12_288 + 20_480
    assert KEYS_TOMBSTONE.nbytes == NAMESPACE_TOMBSTONE.nbytes == 4096


@given(HEADERS, TAGS, OFFSETS)
def test_what_is_encoded_is_parsed(header: FrameHeader, tag: SegmentTag, offset: int) -> None:
    page = encode_header(header, tag, offset)
    assert len(page) == 4096
    assert parse_header(memoryview(page), tag, offset) == header


@given(HEADERS, TAGS, OFFSETS, st.integers(0, 4095), st.integers(1, 255))
def test_any_changed_byte_is_rejected(
    header: FrameHeader, tag: SegmentTag, offset: int, at: int, flip: int
) -> None:
    page = bytearray(encode_header(header, tag, offset))
    page[at] ^= flip
    assert parse_header(bytes(page), tag, offset) is None


@pytest.mark.parametrize(
    ("tag", "offset"),
    [(TAG._replace(nonce=1), OFFSET), (TAG._replace(number=8), OFFSET), (TAG, OFFSET + 4096)],
)
def test_a_header_from_another_place_is_no_header(tag: SegmentTag, offset: int) -> None:
    assert parse_header(encode_header(RUN, TAG, OFFSET), tag, offset) is None


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_no_header(data: bytes) -> None:
    assert parse_header(data, TAG, OFFSET) is None


@given(st.binary(max_size=4088), st.booleans())
def test_arbitrary_bytes_with_a_right_checksum_never_raise(data: bytes, like_a_frame: bool) -> None:
    # What a release with other rules, or a bug, could have written with the right seed.
    head = encode_header(RUN, TAG, OFFSET)
    body = head[:10] + data[10:16] + head[16:40] + data[40:] if like_a_frame else data
    header = parse_header(guard(body[:4088], TAG.nonce), TAG, OFFSET)
    assert header is None or encode_header(header, TAG, OFFSET)


def test_a_frame_of_another_version_or_with_an_unknown_flag_is_dropped() -> None:
    page = encode_header(RUN, TAG, OFFSET)
    for at in (8, 12):
        body = bytearray(page[:4088])
        body[at] ^= 2
        assert parse_header(guard(bytes(body), TAG.nonce), TAG, OFFSET) is None


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": 0},
        {"sequence": 2**64 - 1},
        {"namespace_id": b"short"},
        {"tenant": b"short"},
        {"part": Part(256, 0)},
        {"part": Part(0, 4096)},
        {"first_block": 2**32},
        {"codec_id": 256},
        {"codec_id": 0},  # raw, and stored in another size
        {"parent": bytes(32)},
        {"blocks": ()},
        {"blocks": RUN.blocks * 9},
        {"blocks": (RUN.blocks[0]._replace(raw_nbytes=0),)},
        {"blocks": (RUN.blocks[0]._replace(raw_nbytes=2**30 + 1),)},
        {"blocks": (RUN.blocks[0]._replace(stored_nbytes=2**31 + 1),)},
        {"blocks": (RUN.blocks[0]._replace(stored_checksum=2**64),)},
        {"blocks": (RUN.blocks[0]._replace(key=BlockKey(b"short")),)},
        {"killed": (BlockKey(b"k" * 32),)},
        {"kind": FrameKind.TOMBSTONE_KEYS},
    ],
)
def test_values_that_the_page_cannot_hold_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="not a frame header"):
        replace(RUN, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 65])
def test_a_tombstone_of_keys_has_1_to_64(count: int) -> None:
    with pytest.raises(InvalidRequest, match="killed keys"):
        replace(KEYS_TOMBSTONE, killed=(BlockKey(b"k" * 32),) * count)
