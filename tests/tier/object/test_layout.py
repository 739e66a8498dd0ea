"""The bytes of an object: golden, read back, and hostile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import FrameHeader, FrameKind, Trailer
from kvstore.format.frame.page import guard
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Part
from kvstore.model.errors import CorruptBlock, InvalidRequest
from kvstore.tier.object import Run, lay_out, run_blocks
from kvstore.tier.object.layout import read_footer, read_trailer
from kvstore.tier.object.names import (
    RunName,
    TombstoneName,
    parse_run_name,
    parse_tombstone_name,
)
from kvstore.tier.object.tombstones import encode_tombstone, parse_tombstone
from tests.tier.object.runs import NAMESPACE, PARTS, frames, prefix_of

GOLDEN = Path(__file__).parent / "golden"
KEYS = prefix_of("golden", 20)
HEADERS = [header for header, _ in frames(KEYS, 2, 20, nbytes=5000)]
RUN, PAGES, FOOTER = lay_out(HEADERS)


def parsed(name: RunName, nbytes: int, tail: bytes) -> Run:
    view = memoryview(tail)
    trailer = read_trailer(name, nbytes, view[-4096:])
    return read_footer(name, nbytes, trailer, view[: trailer.footer_nbytes])


def test_the_bytes_and_the_name_of_an_object_never_change() -> None:
    assert b"".join(PAGES) + FOOTER == (GOLDEN / "run.bin").read_bytes()
    assert str(RUN.name) == (GOLDEN / "run.name").read_text().strip()
    assert parsed(RUN.name, RUN.nbytes, FOOTER) == RUN


def test_the_bytes_of_a_tombstone_never_change() -> None:
    name = TombstoneName(NAMESPACE, 0x1122334455667788)
    data = encode_tombstone(name, sample := [*KEYS, *prefix_of("more", 60)])
    assert data == (GOLDEN / "tombstone.bin").read_bytes()
    assert parse_tombstone(name, 5.0, memoryview(data)).keys == frozenset(sample)
    whole = encode_tombstone(name, None)
    assert parse_tombstone(name, 5.0, memoryview(whole)).keys is None


def test_a_run_says_where_everything_is() -> None:
    assert (RUN.first_block, RUN.keys) == (2, tuple(KEYS[2:]))
    assert [frame.header.part for frame in RUN.frames] == [PARTS[0]] * 2 + [PARTS[1]] * 2
    assert {frame.header.sequence for frame in RUN.frames} == {1}
    assert RUN.nbytes == sum(header.nbytes for header in HEADERS) + len(FOOTER)


def test_the_same_content_has_the_same_name_and_other_content_another() -> None:
    again, _, _ = lay_out([replace(header, sequence=9) for header in HEADERS])
    assert again == RUN
    block = HEADERS[0].blocks[0]
    other = (block._replace(raw_checksum=block.raw_checksum ^ 1), *HEADERS[0].blocks[1:])
    changed, _, _ = lay_out([replace(HEADERS[0], blocks=other), *HEADERS[1:]])
    assert (changed.name.first, changed.name.last) == (RUN.name.first, RUN.name.last)
    assert changed.name != RUN.name


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [HEADERS[0], HEADERS[0]],
        [HEADERS[0], frames(KEYS, 2, 20, namespace_id=NamespaceId(b"o" * 32))[2][0]],
        [HEADERS[0], replace(HEADERS[2], first_block=3)],
        [HEADERS[0], frames(prefix_of("golden", 40), 30)[0][0]],
        [replace(HEADERS[0], tenant=b"t" * 16)],
        [FrameHeader(FrameKind.TOMBSTONE_KEYS, 1, NAMESPACE, killed=(KEYS[0],))],
        [header for header, _ in frames(prefix_of("long", 300), parts=PARTS[:1], nbytes=64)],
    ],
)
def test_what_is_not_one_run_is_refused(headers: Sequence[FrameHeader]) -> None:
    with pytest.raises(InvalidRequest, match="not the frames of one run"):
        lay_out(headers)


@given(st.integers(0, len(FOOTER) - 1), st.integers(1, 255))
def test_a_changed_byte_is_rejected_or_in_the_filling(at: int, flip: int) -> None:
    data = bytearray(FOOTER)
    data[at] ^= flip
    trailer = read_trailer(RUN.name, RUN.nbytes, memoryview(FOOTER)[-4096:])
    if trailer.footer_nbytes <= at < len(FOOTER) - 4096:
        assert parsed(RUN.name, RUN.nbytes, bytes(data)) == RUN
        return
    with pytest.raises(CorruptBlock):
        parsed(RUN.name, RUN.nbytes, bytes(data))


@given(st.binary(max_size=5000), st.integers(0, 1 << 45))
def test_arbitrary_bytes_are_no_object(data: bytes, nbytes: int) -> None:
    with pytest.raises(CorruptBlock):
        parsed(RUN.name, nbytes, data)


@given(st.binary(max_size=4088), st.integers(0, 1 << 45))
def test_an_arbitrary_trailer_with_a_right_checksum_is_rejected(body: bytes, nbytes: int) -> None:
    for page in (body, FOOTER[-4096:][:32] + body[32:]):
        with pytest.raises(CorruptBlock):
            parsed(RUN.name, nbytes, FOOTER[:-4096] + guard(page[:4088], RUN.name.nonce))


@given(st.binary(max_size=2000), st.integers(0, 9))
def test_an_arbitrary_footer_with_a_right_checksum_is_rejected(body: bytes, count: int) -> None:
    from kvstore.model.checksum import checksum

    trailer = Trailer(1 << 20, len(body), count, checksum(body), 1)
    with pytest.raises(CorruptBlock):
        read_footer(RUN.name, 1 << 20, trailer, memoryview(body))


def test_an_object_under_another_name_or_of_another_size_is_no_object() -> None:
    for name in (
        replace(RUN.name, nonce=RUN.name.nonce ^ 1),
        replace(RUN.name, first=KEYS[0]),
        replace(RUN.name, last=KEYS[0]),
        replace(RUN.name, namespace_id=NamespaceId(b"o" * 32)),
    ):
        with pytest.raises(CorruptBlock):
            parsed(name, RUN.nbytes, FOOTER)
    with pytest.raises(CorruptBlock, match="no trailer"):
        parsed(RUN.name, RUN.nbytes + 4096, FOOTER)


@given(
    st.text(max_size=300) | st.from_regex(r"[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{64}-[0-9a-f]{16}")
)
def test_a_name_is_read_back_or_refused(text: str) -> None:
    name, tombstone = parse_run_name(text), parse_tombstone_name(text)
    assert name is None or str(name) == text
    assert tombstone is None or str(tombstone) == text


@given(st.binary(max_size=9000))
def test_arbitrary_bytes_are_no_tombstone(data: bytes) -> None:
    with pytest.raises(CorruptBlock):
        parse_tombstone(TombstoneName(NAMESPACE, 1), 0.0, memoryview(data))


@pytest.mark.parametrize(
    ("record_nbytes", "shards", "expected"),
    [(2 << 20, 1, 16), (2 << 20, 8, 2), (1 << 30, 1, 1), (131_072, 1, 256), (1, 1, 256)],
)
def test_a_run_is_cut_by_the_namespace_alone(
    record_nbytes: int, shards: int, expected: int
) -> None:
    group = Group("all", record_nbytes, shards=shards)
    assert run_blocks(Namespace(block_tokens=16, groups=(group,), identity=())) == expected


def test_parts_of_a_block_need_not_be_in_one_object() -> None:
    first, _, _ = lay_out([header for header, _ in frames(KEYS, 0, 8, parts=[Part(0, 0)])])
    second, _, _ = lay_out([header for header, _ in frames(KEYS, 0, 8, parts=[Part(0, 1)])])
    assert first.keys == second.keys == tuple(BlockKey(key) for key in KEYS[:8])
    assert first.name != second.name
