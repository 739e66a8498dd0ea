"""The header page of a frame: what is stored there, under which keys. Layout: see the package."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, starmap
from typing import NamedTuple

from kvstore.format.frame.page import (
    BODY_NBYTES,
    SEALED_VERSION,
    U64_MAX,
    SegmentTag,
    guard,
    is_guarded,
)
from kvstore.format.frame.seal import (
    PLAIN_BODY_NBYTES,
    PLAIN_NBYTES,
    SEAL_NBYTES,
    SegmentKey,
    open_page,
    seal_page,
)
from kvstore.model.block import (
    FORMAT_VERSION,
    GROUPS_MAX,
    KEY_NBYTES,
    PAGE_NBYTES,
    RECORD_NBYTES_MAX,
    SHARDS_MAX,
    BlockKey,
    NamespaceId,
    Part,
    padded,
)
from kvstore.model.errors import InvalidRequest

MAGIC = b"KVSFRAME"
TENANT_NBYTES = 16
NO_TENANT = bytes(TENANT_NBYTES)
NO_KEY = bytes(KEY_NBYTES)
WHOLE = Part(0, 0)  # of a tombstone, which kills every part
RUN_BLOCKS_MAX = 16
KILLED_MAX = 64
# A codec may expand a block that it shares a run with; no codec here doubles one.
STORED_NBYTES_MAX = 2 * RECORD_NBYTES_MAX

CLEAR_NBYTES = 40  # of a sealed frame: what finds it, and orders it

_FIXED = struct.Struct("<8sHBBIQQQ16s32s32sIIII")
_CLEAR = struct.Struct("<8sHBBIQQQ")
_KEY = struct.Struct("<32s")


class Layout(NamedTuple):
    """What differs between the format versions. body_nbytes: of a page, before its checksum."""

    version: int
    flags: int
    entry: struct.Struct
    body_nbytes: int


PLAIN = Layout(FORMAT_VERSION, 0, struct.Struct("<32sIIQQ"), BODY_NBYTES)
SEALED = Layout(SEALED_VERSION, 1, struct.Struct(f"<32sIIQQ{SEAL_NBYTES}s"), PLAIN_BODY_NBYTES)


class FrameKind(IntEnum):
    """Persistent: the numbers are never reused."""

    RUN = 1
    TOMBSTONE_KEYS = 2
    TOMBSTONE_NAMESPACE = 3


_KINDS = frozenset(FrameKind)


class RunBlock(NamedTuple):
    """One block of a run: sizes without padding; raw is the record, stored what is in the file.

    seal: nonce and tag of the stored bytes, where they are encrypted; else empty.
    """

    key: BlockKey
    raw_nbytes: int
    stored_nbytes: int
    raw_checksum: int
    stored_checksum: int
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says about itself.

    blocks: only in a RUN, 1..16 consecutive blocks of one prefix.
    killed: only in TOMBSTONE_KEYS, 1..64 keys, of which all parts are dead.
    parent: key of the block before the run; None at the start of a prefix.
    Raises InvalidRequest for values the page cannot hold.
    """

    kind: FrameKind
    sequence: int
    namespace_id: NamespaceId
    part: Part = WHOLE
    first_block: int = 0
    parent: BlockKey | None = None
    blocks: tuple[RunBlock, ...] = ()
    killed: tuple[BlockKey, ...] = ()
    codec_id: int = 0
    tenant: bytes = NO_TENANT

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise InvalidRequest(f"not a frame header: {problem}")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole frame in the file: header page and padded payload."""
        return PAGE_NBYTES + sum(padded(block.stored_nbytes) for block in self.blocks)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each block's stored bytes begin, counted from the start of the frame."""
        sizes = [padded(block.stored_nbytes) for block in self.blocks]
        return tuple(accumulate(sizes[:-1], initial=PAGE_NBYTES)) if sizes else ()

    @property
    def is_tombstone(self) -> bool:
        return self.kind is not FrameKind.RUN


def encode_header(
    header: FrameHeader, tag: SegmentTag, offset: int, key: SegmentKey | None = None
) -> bytes:
    """Return the 4 KiB page of a frame that stands at `offset` of the segment `tag`.

    key: seals it. Raises InvalidRequest if then a block has no seal, or the tenant is another.
    """
    if key is None:
        return plain_page(header, tag, offset, PLAIN)
    if header.tenant != key.tenant:
        raise InvalidRequest("a frame of another tenant than its segment's")
    return seal_page(plain_page(header, tag, offset, SEALED), CLEAR_NBYTES, key)


def plain_page(header: FrameHeader, tag: SegmentTag, offset: int, layout: Layout) -> bytes:
    """Return the page before it is sealed, shorter by its seal; of PLAIN, the page itself."""
    fixed = _FIXED.pack(
        MAGIC,
        layout.version,
        header.kind,
        header.codec_id,
        layout.flags,
        header.sequence,
        offset,
        tag.number,
        header.tenant,
        header.namespace_id,
        header.parent or NO_KEY,
        header.part.group,
        header.part.shard,
        header.first_block,
        len(header.blocks) or len(header.killed),
    )
    entries = b"".join(_entry(block, layout) for block in header.blocks)
    return guard(fixed + entries + b"".join(header.killed), tag.nonce, layout.body_nbytes)


def parse_header(
    page: bytes | memoryview, tag: SegmentTag, offset: int, key: SegmentKey | None = None
) -> FrameHeader | None:
    """Return the header that `page`, read at `offset` of the segment `tag`, holds; else None.

    key: of a sealed segment, in which nothing else counts as a header.
    """
    if key is None:
        return parse_plain(page, tag, offset, PLAIN)
    plain = open_page(page, CLEAR_NBYTES, key)
    header = parse_plain(plain, tag, offset, SEALED) if plain is not None else None
    return header if header is not None and header.tenant == key.tenant else None


def parse_plain(
    page: bytes | memoryview, tag: SegmentTag, offset: int, layout: Layout
) -> FrameHeader | None:
    """Parse what `plain_page` made; None for anything else."""
    if not is_guarded(page, tag.nonce, layout.body_nbytes):
        return None
    (
        magic,
        version,
        kind,
        codec_id,
        flags,
        sequence,
        own_offset,
        number,
        tenant,
        namespace_id,
        parent,
        group,
        shard,
        first_block,
        count,
    ) = _FIXED.unpack_from(page)
    if (magic, version, flags) != (MAGIC, layout.version, layout.flags):
        return None
    if (number, own_offset) != (tag.number, offset) or count > KILLED_MAX:
        return None
    try:
        frame_kind = FrameKind(kind)
        blocks, killed = _entries(page, frame_kind, count, layout)
        return FrameHeader(
            kind=frame_kind,
            sequence=sequence,
            namespace_id=NamespaceId(namespace_id),
            part=Part(group, shard),
            first_block=first_block,
            parent=None if parent == NO_KEY else BlockKey(parent),
            blocks=blocks,
            killed=killed,
            codec_id=codec_id,
            tenant=tenant,
        )
    except (ValueError, InvalidRequest):  # unknown kind, impossible values
        return None


def pack_header(page: bytes | memoryview) -> bytes:
    """Return what `plain_page` made without its zeros, as a footer holds it."""
    layout = SEALED if len(page) == PLAIN_NBYTES else PLAIN
    kind, count = page[10], _FIXED.unpack_from(page)[-1]
    return bytes(page[: _used_nbytes(kind, count, layout)]) + bytes(page[layout.body_nbytes :])


def unpack_header(
    packed: bytes | memoryview, tag: SegmentTag, layout: Layout = PLAIN
) -> tuple[int, FrameHeader] | None:
    """Return offset and header of what `pack_header` wrote; None for anything else."""
    if not _FIXED.size + 8 <= len(packed) <= layout.body_nbytes + 8:
        return None
    page = bytes(packed[:-8]).ljust(layout.body_nbytes, b"\0") + bytes(packed[-8:])
    offset: int = _FIXED.unpack_from(page)[6]
    header = parse_plain(page, tag, offset, layout)
    return (offset, header) if header is not None else None


def sealed_place(page: bytes | memoryview) -> tuple[int, int] | None:
    """Return the segment number and the offset that a sealed frame's page says in clear.

    Nothing vouches for them without the key.
    """
    if len(page) < CLEAR_NBYTES:
        return None
    magic, version, kind, _, flags, _, offset, number = _CLEAR.unpack_from(page)
    known = (magic, version, flags) == (MAGIC, SEALED.version, SEALED.flags) and kind in _KINDS
    return (number, offset) if known else None


def _entry(block: RunBlock, layout: Layout) -> bytes:
    if layout is PLAIN:
        return layout.entry.pack(*block[:5])
    if len(block.seal) != SEAL_NBYTES:
        raise InvalidRequest("a block without its seal in a sealed frame")
    return layout.entry.pack(*block)


def _entries(
    page: bytes | memoryview, kind: FrameKind, count: int, layout: Layout
) -> tuple[tuple[RunBlock, ...], tuple[BlockKey, ...]]:
    used = page[_FIXED.size : _used_nbytes(kind, count, layout)]
    if kind is FrameKind.RUN:
        return tuple(starmap(RunBlock, layout.entry.iter_unpack(used))), ()
    return (), tuple(BlockKey(key) for (key,) in _KEY.iter_unpack(used))


def _used_nbytes(kind: int, count: int, layout: Layout) -> int:
    entry = layout.entry if kind == FrameKind.RUN else _KEY
    return _FIXED.size + count * entry.size


def _problem(header: FrameHeader) -> str:
    if not 0 < header.sequence < U64_MAX:
        return f"sequence {header.sequence}"
    if len(header.namespace_id) != KEY_NBYTES or len(header.tenant) != TENANT_NBYTES:
        return "namespace id or tenant of a wrong size"
    if not 0 <= header.part.group < GROUPS_MAX or not 0 <= header.part.shard < SHARDS_MAX:
        return f"part {header.part}"
    if header.kind is FrameKind.RUN:
        return _run_problem(header)
    if header.blocks or header.codec_id or header.part != WHOLE or header.parent is not None:
        return "a tombstone has neither blocks nor a place in a prefix"
    return _killed_problem(header)


def _killed_problem(header: FrameHeader) -> str:
    fewest, most = (1, KILLED_MAX) if header.kind is FrameKind.TOMBSTONE_KEYS else (0, 0)
    if not fewest <= len(header.killed) <= most:
        return f"{len(header.killed)} killed keys; {fewest}..{most} are allowed"
    if any(len(key) != KEY_NBYTES for key in header.killed):
        return "a killed key of a wrong size"
    return ""


def _run_problem(header: FrameHeader) -> str:
    if header.killed or not 1 <= len(header.blocks) <= RUN_BLOCKS_MAX:
        return f"a run has 1..{RUN_BLOCKS_MAX} blocks and kills nothing"
    if not 0 <= header.first_block < 1 << 32 or not 0 <= header.codec_id < 1 << 8:
        return f"first block {header.first_block} or codec {header.codec_id}"
    if header.parent is not None and (len(header.parent) != KEY_NBYTES or header.parent == NO_KEY):
        return "parent is not a key"
    return _blocks_problem(header.blocks, header.codec_id)


def _blocks_problem(blocks: Sequence[RunBlock], codec_id: int) -> str:
    """Look at one value of all blocks at a time: several times faster than a block at a time."""
    keys, raw, stored, raw_checksums, stored_checksums, seals = zip(*blocks, strict=True)
    if set(map(len, keys)) != {KEY_NBYTES} or not {0, SEAL_NBYTES}.issuperset(map(len, seals)):
        return "a block with a key or a seal of a wrong size"
    if not 1 <= min(raw) <= max(raw) <= RECORD_NBYTES_MAX:
        return f"blocks of {min(raw)} to {max(raw)} bytes"
    if not 1 <= min(stored) <= max(stored) <= STORED_NBYTES_MAX:
        return f"blocks stored in {min(stored)} to {max(stored)} bytes"
    if codec_id == 0 and stored != raw:
        return "a raw block stored in another size"
    checksums = raw_checksums + stored_checksums
    if not 0 <= min(checksums) <= max(checksums) <= U64_MAX:
        return "a checksum beyond 64 bits"
    return ""
