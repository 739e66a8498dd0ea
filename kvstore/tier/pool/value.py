"""A value of the pool: the header page of a frame of one block, then its record. Pure.

The page is that of files (`kvstore.format.frame`), with offset and segment number 0; its checksum
is seeded with the value's name, so what was put under another name does not pass. Its sequence is
the time at which it was put, in ms since the epoch: see `graves`.
"""

from __future__ import annotations

import xxhash

from kvstore.format.frame import (
    FrameHeader,
    FrameKind,
    RunBlock,
    SegmentTag,
    encode_header,
    parse_header,
)
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId, Part

RAW = 0


def value_nbytes(record_nbytes: int) -> int:
    return PAGE_NBYTES + record_nbytes


def encode_page(
    name: str,
    namespace_id: NamespaceId,
    part: Part,
    *,
    key: BlockKey,
    parent: BlockKey | None,
    block_index: int,
    nbytes: int,
    checksum: int,
    stamp: int,
) -> bytes:
    """Return the page before a record. checksum: of the record, as its writer told it. stamp: when
    it is put."""
    header = FrameHeader(
        kind=FrameKind.RUN,
        sequence=stamp,
        namespace_id=namespace_id,
        part=part,
        first_block=block_index,
        parent=parent,
        codec_id=RAW,
        blocks=(RunBlock(key, nbytes, nbytes, checksum, checksum),),
    )
    return encode_header(header, _tag(name), 0)


def parse_page(
    page: memoryview,
    name: str,
    namespace_id: NamespaceId,
    part: Part,
    *,
    key: BlockKey,
    nbytes: int,
) -> tuple[int, int] | None:
    """Return checksum and stamp of the record after a page; None if the page is not the
    record's."""
    header = parse_header(page, _tag(name), 0)
    if header is None or (header.kind, header.codec_id) != (FrameKind.RUN, RAW):
        return None
    if (header.namespace_id, header.part, len(header.blocks)) != (namespace_id, part, 1):
        return None
    block = header.blocks[0]
    if (block.key, block.raw_nbytes) != (key, nbytes):
        return None
    return block.raw_checksum, header.sequence


def _tag(name: str) -> SegmentTag:
    return SegmentTag(0, xxhash.xxh3_64_intdigest(name.encode()))
