from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import (
    NONCE_NBYTES,
    FrameHeader,
    PackedFrames,
    SegmentTag,
    block_aad,
    clear_trailer,
    encode_footer,
    encode_header,
    encode_segment_header,
    pack_header,
    parse_footer,
    parse_header,
    parse_segment_header,
    parse_trailer,
    sealed_place,
    segment_keys,
)
from kvstore.format.frame.header import SEALED, plain_page
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.model.errors import InvalidRequest
from tests.format.frame.keys import CountedKey
from tests.format.frame.strategies import HEADERS, OFFSETS, TAGS
from tests.format.frame.test_header import GOLDEN, KEYS_TOMBSTONE, NAMESPACE_TOMBSTONE, OFFSET, TAG
from tests.format.frame.test_header import RUN as PLAIN_RUN

TENANT = b"t" * 16
RUN = replace(PLAIN_RUN, blocks=tuple(b._replace(seal=b"s" * 28) for b in PLAIN_RUN.blocks))
TOMBSTONE = replace(KEYS_TOMBSTONE, tenant=TENANT)
FRAMES = [(4096, RUN), (4096 + RUN.nbytes, TOMBSTONE)]
END = 4096 + RUN.nbytes + 4096
SEALED_HEADERS = {
    "sealed_run": RUN,
    "sealed_tombstone_keys": TOMBSTONE,
    "sealed_tombstone_namespace": replace(NAMESPACE_TOMBSTONE, tenant=TENANT),
}


def sealed(header: FrameHeader) -> FrameHeader:
    """Return any header as one of a sealed segment of TENANT."""
    blocks = tuple(block._replace(seal=b"s" * 28) for block in header.blocks)
    return replace(header, blocks=blocks, tenant=TENANT)


def footer_of(tag: SegmentTag, frames: list[tuple[int, FrameHeader]], end: int) -> bytes:
    packed = [pack_header(plain_page(header, tag, offset, SEALED)) for offset, header in frames]
    return encode_footer(tag, end, packed, 42, key=CountedKey())


def parsed(data: bytes, tag: SegmentTag, key: CountedKey) -> list[tuple[int, FrameHeader]] | None:
    trailer = parse_trailer(data[-4096:], tag, key)
    return parse_footer(data[: trailer.footer_nbytes], trailer, tag, key) if trailer else None


@pytest.mark.parametrize("name", SEALED_HEADERS)
def test_the_bytes_of_a_sealed_header_never_change(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert encode_header(SEALED_HEADERS[name], TAG, OFFSET, CountedKey()) == golden
    assert parse_header(golden, TAG, OFFSET, CountedKey()) == SEALED_HEADERS[name]


def test_the_bytes_of_a_sealed_footer_never_change() -> None:
    golden = (GOLDEN / "sealed_footer.bin").read_bytes()
    assert footer_of(TAG, FRAMES, END) == golden
    assert parsed(golden, TAG, CountedKey()) == FRAMES
    clear = clear_trailer(golden[-4096:], TAG)
    assert clear is not None
    assert (clear.key, clear.file_nbytes) == (CountedKey().wrapped, END + len(golden))


def test_the_bytes_of_a_sealed_segment_header_never_change() -> None:
    golden = (GOLDEN / "sealed_segment_header.bin").read_bytes()
    assert encode_segment_header(TAG, CountedKey()) == golden
    assert parse_segment_header(golden) == TAG
    assert segment_keys(golden) == [CountedKey().wrapped] * 2
    assert segment_keys(encode_segment_header(TAG)) == []
    for at in range(4096):  # no byte is in both copies
        damaged = bytearray(golden)
        damaged[at] ^= 0x40
        assert CountedKey().wrapped in segment_keys(bytes(damaged))


@given(HEADERS, TAGS, OFFSETS)
def test_what_is_sealed_is_opened(header: FrameHeader, tag: SegmentTag, offset: int) -> None:
    page = encode_header(sealed(header), tag, offset, CountedKey())
    assert len(page) == 4096
    assert parse_header(memoryview(page), tag, offset, CountedKey()) == sealed(header)
    assert sealed_place(page) == (tag.number, offset)


@given(st.sampled_from(list(SEALED_HEADERS.values())), st.integers(1, 255))
def test_every_changed_byte_of_a_page_is_rejected(header: FrameHeader, flip: int) -> None:
    key = CountedKey()
    page = bytearray(encode_header(header, TAG, OFFSET, key))
    for at in range(0, 4096, 7):
        page[at] ^= flip
        assert parse_header(bytes(page), TAG, OFFSET, key) is None
        page[at] ^= flip
    assert parse_header(bytes(page), TAG, OFFSET, key) == header


@pytest.mark.parametrize(
    ("tag", "offset", "key"),
    [
        (TAG._replace(nonce=1), OFFSET, CountedKey()),
        (TAG._replace(number=8), OFFSET, CountedKey()),
        (TAG, OFFSET + 4096, CountedKey()),
        (TAG, OFFSET, CountedKey(tenant=b"u" * 16)),
        (TAG, OFFSET, CountedKey(key=b"k" * 32)),
        (TAG, OFFSET, None),
    ],
)
def test_a_header_of_another_place_tenant_or_key_is_no_header(
    tag: SegmentTag, offset: int, key: CountedKey | None
) -> None:
    assert parse_header(encode_header(RUN, TAG, OFFSET, CountedKey()), tag, offset, key) is None


def test_a_plain_frame_is_no_frame_of_a_sealed_segment() -> None:
    page = encode_header(PLAIN_RUN, TAG, OFFSET)
    assert parse_header(page, TAG, OFFSET) == PLAIN_RUN
    assert parse_header(page, TAG, OFFSET, CountedKey()) is None
    assert sealed_place(page) is None


def test_nothing_of_a_key_or_namespace_is_readable() -> None:
    pages = [encode_header(header, TAG, OFFSET, CountedKey()) for header in SEALED_HEADERS.values()]
    everything = b"".join([*pages, footer_of(TAG, FRAMES, END)])
    for secret in (RUN.namespace_id, RUN.parent or b"", *(block.key for block in RUN.blocks)):
        assert secret[:8] not in everything


def test_a_page_needs_the_seals_of_its_blocks_and_its_own_tenant() -> None:
    with pytest.raises(InvalidRequest, match="seal"):
        encode_header(PLAIN_RUN, TAG, OFFSET, CountedKey())
    with pytest.raises(InvalidRequest, match="tenant"):
        encode_header(RUN, TAG, OFFSET, CountedKey(tenant=b"u" * 16))
    with pytest.raises(InvalidRequest, match="seal"):
        replace(RUN, blocks=(RUN.blocks[0]._replace(seal=b"short"),))


@given(TAGS, st.lists(HEADERS, max_size=4))
def test_a_sealed_footer_lists_what_was_put_in(tag: SegmentTag, headers: list[FrameHeader]) -> None:
    frames, position = [], 4096
    for header in map(sealed, headers):
        frames.append((position, header))
        position += header.nbytes
    footer = footer_of(tag, frames, position)
    assert parsed(footer, tag, CountedKey()) == frames
    packed = [pack_header(plain_page(header, tag, at, SEALED)) for at, header in frames]
    found = PackedFrames.of(packed, tag, sealed=True)
    assert found.headers() == frames
    assert found.nbytes.tolist() == [header.nbytes for _, header in frames]
    heads = [int.from_bytes(b.key[:8], "little") for _, header in frames for b in header.blocks]
    assert found.heads.tolist() == heads


@given(st.integers(0, 8191), st.integers(1, 255))
def test_a_changed_byte_of_a_sealed_footer_is_rejected_or_in_the_filling(
    at: int, flip: int
) -> None:
    data = bytearray(footer_of(TAG, FRAMES, END))
    trailer = parse_trailer(bytes(data[-4096:]), TAG, CountedKey())
    assert trailer is not None
    data[at] ^= flip
    in_filling = trailer.footer_nbytes <= at < 4096
    assert parsed(bytes(data), TAG, CountedKey()) == (FRAMES if in_filling else None)


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_no_sealed_pages(data: bytes) -> None:
    key = CountedKey()
    assert parse_header(data, TAG, OFFSET, key) is None
    assert parse_trailer(data, TAG, key) is None
    assert segment_keys(data) == []
    assert clear_trailer(data, TAG) is None
    assert sealed_place(data) is None


def test_a_block_opens_only_as_what_it_is() -> None:
    key, payload = CountedKey(), memoryview(bytes(range(256)) * 80)
    target = memoryview(bytearray(len(payload) + 16))
    seal = key.seal(payload, block_aad(RUN, 0), target)
    plain = memoryview(bytearray(len(payload)))
    nonce = seal[:NONCE_NBYTES]
    others = [
        block_aad(RUN, 1),
        block_aad(replace(RUN, tenant=b"u" * 16), 0),
        block_aad(replace(RUN, namespace_id=NamespaceId(b"o" * 32)), 0),
        block_aad(replace(RUN, part=Part(3, 6)), 0),
        block_aad(replace(RUN, part=Part(4, 5)), 0),
        block_aad(replace(RUN, first_block=161), 0),
        block_aad(replace(RUN, codec_id=2), 0),
        block_aad(replace(RUN, blocks=(RUN.blocks[0]._replace(key=BlockKey(b"c" * 32)),)), 0),
        block_aad(replace(RUN, blocks=(RUN.blocks[0]._replace(raw_nbytes=19_999),)), 0),
    ]
    for aad in others:
        assert not key.open(target, nonce, aad, plain)
        assert not any(plain)
    assert key.open(target, nonce, block_aad(RUN, 0), plain)
    assert plain == payload
