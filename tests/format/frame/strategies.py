"""Headers of every kind, as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstore.format.frame import (
    KILLED_MAX,
    RUN_BLOCKS_MAX,
    FrameHeader,
    FrameKind,
    RunBlock,
    SegmentTag,
)
from kvstore.model.block import RECORD_NBYTES_MAX, BlockKey, NamespaceId, Part

U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32).filter(any).map(BlockKey)
NAMESPACES = st.binary(min_size=32, max_size=32).map(NamespaceId)
SEQUENCES = st.integers(1, 2**64 - 2)
TENANTS = st.binary(min_size=16, max_size=16)
TAGS = st.builds(SegmentTag, U64, U64)
OFFSETS = st.integers(1, 1 << 40).map(lambda page: page * 4096)
SIZES = st.integers(1, RECORD_NBYTES_MAX)


@st.composite
def runs(draw: st.DrawFn) -> FrameHeader:
    codec_id = draw(st.integers(0, 255))
    blocks = []
    for key in draw(st.lists(KEYS, min_size=1, max_size=RUN_BLOCKS_MAX)):
        raw = draw(SIZES)
        stored = draw(SIZES) if codec_id else raw
        blocks.append(RunBlock(key, raw, stored, draw(U64), draw(U64)))
    return FrameHeader(
        kind=FrameKind.RUN,
        sequence=draw(SEQUENCES),
        namespace_id=draw(NAMESPACES),
        part=Part(draw(st.integers(0, 255)), draw(st.integers(0, 4095))),
        first_block=draw(st.integers(0, 2**32 - 1)),
        parent=draw(st.none() | KEYS),
        blocks=tuple(blocks),
        codec_id=codec_id,
        tenant=draw(TENANTS),
    )


@st.composite
def tombstones(draw: st.DrawFn) -> FrameHeader:
    killed = tuple(draw(st.lists(KEYS, max_size=KILLED_MAX)))
    return FrameHeader(
        kind=FrameKind.TOMBSTONE_KEYS if killed else FrameKind.TOMBSTONE_NAMESPACE,
        sequence=draw(SEQUENCES),
        namespace_id=draw(NAMESPACES),
        killed=killed,
        tenant=draw(TENANTS),
    )


HEADERS = runs() | tombstones()
