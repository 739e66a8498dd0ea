"""The layout of an object: the frames of a run back to back, then a footer. Pure.

The frames and the footer are those of a sealed segment (`kvstore.format.frame` has the byte
tables), with these differences: there is no segment header, so the first frame stands at offset 0;
the segment number is 0, the nonce is the name's; every sequence is 1, because the store's clock
orders objects. A footer is checked as a whole: sizes, checksums, that the frames are back to back,
and that their blocks are one run which begins and ends with the keys in the name. An encrypted
object is the same in format 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import xxhash

from kvstore.format.frame import (
    NO_TENANT,
    TAG_NBYTES,
    FrameHeader,
    SegmentKey,
    SegmentTag,
    Trailer,
    encode_footer,
    encode_header,
    pack_header,
    parse_footer,
    parse_trailer,
    seal_block,
)
from kvstore.format.frame.header import SEALED, plain_page
from kvstore.format.frame.packed import footer_record_nbytes
from kvstore.model.block import PAGE_NBYTES, BlockKey, Namespace, NamespaceId, Part, padded
from kvstore.model.errors import CorruptBlock, InvalidRequest
from kvstore.tier.object.names import Names, RunName
from kvstore.tier.object.seal import SealedNames

OBJECT_NBYTES = 32 << 20  # target size of a run
OBJECT_BLOCKS_MAX = 256
OBJECT_NBYTES_MAX = 1 << 40
FOOTER_NBYTES_MAX = 4 << 20
SEQUENCE = 1


class ObjectExtent(NamedTuple):
    """Where a frame is: bytes [offset, offset + nbytes) of the object `name`.

    key: of an encrypted object.
    """

    name: str
    offset: int
    nbytes: int
    key: SegmentKey | None = None


class PlacedFrame(NamedTuple):
    """A frame of an object."""

    offset: int
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class Run:
    """The run in an object. keys: its consecutive blocks; each frame may cover some of them."""

    name: RunName
    nbytes: int
    first_block: int
    keys: tuple[BlockKey, ...]
    frames: tuple[PlacedFrame, ...]
    key: SegmentKey | None = field(default=None, compare=False)

    @property
    def records(self) -> int:
        return sum(len(frame.header.blocks) for frame in self.frames)

    def holds(self, namespace_id: NamespaceId, keys: AbstractSet[BlockKey] | None) -> bool:
        """Say whether any of `keys`, or (None) anything of the namespace, is in it; its id is that
        in names."""
        same = self.name.namespace_id == namespace_id
        return same and (keys is None or not keys.isdisjoint(self.keys))

    def extent(self, frame: PlacedFrame) -> ObjectExtent:
        return ObjectExtent(str(self.name), frame.offset, frame.header.nbytes, self.key)


def run_blocks(namespace: Namespace) -> int:
    """Return how many blocks an object of this namespace holds at most.

    Runs end at its multiples. It is a power of two, so that an object has 16 to 32 MiB of records
    unless blocks are tiny or larger than that. It is part of the format: all daemons that share a
    bucket must compute the same, so it depends only on the namespace.
    """
    block_nbytes = sum(padded(group.record_nbytes) * group.shards for group in namespace.groups)
    fitting = max(1, min(OBJECT_NBYTES // block_nbytes, OBJECT_BLOCKS_MAX))
    return 1 << (fitting.bit_length() - 1)


def lay_out(headers: Sequence[FrameHeader]) -> tuple[Run, list[bytes], bytes]:
    """Return the run that `headers` make, their header pages in order, and the footer.

    The object is each page followed by the padded stored bytes of its frame, then the footer.
    Raises InvalidRequest if they are not frames of one run.
    """
    plain = [replace(header, sequence=SEQUENCE) for header in headers]
    run, unnamed = _unnamed_run(plain, NO_TENANT)
    nonce = xxhash.xxh3_64_intdigest(b"".join(map(pack_header, unnamed)))
    name = replace(run.name, nonce=nonce)
    pages = [encode_header(header, name.tag, offset) for offset, header in run.frames]
    footer = encode_footer(name.tag, run.nbytes, [pack_header(page) for page in pages], SEQUENCE)
    _check_footer(len(footer), len(pages))
    return replace(run, name=name, nbytes=run.nbytes + len(footer)), pages, footer


def _unnamed_run(headers: Sequence[FrameHeader], tenant: bytes) -> tuple[Run, list[bytes]]:
    """Return the run of some frames, with no nonce yet and without its footer's bytes, and what its
    nonce is a digest of. Raises InvalidRequest."""
    frames, end = [], 0
    for header in headers:
        frames.append(PlacedFrame(end, header))
        end += header.nbytes
    problem, first_block, keys = _chain(frames, tenant)
    if problem or not frames or len(keys) > OBJECT_BLOCKS_MAX or end > OBJECT_NBYTES_MAX:
        raise InvalidRequest(f"not the frames of one run: {problem or 'too many or too few'}")
    unnamed = [encode_header(header, SegmentTag(0, 0), offset) for offset, header in frames]
    name = RunName(headers[0].namespace_id, keys[0], keys[-1], 0)
    return Run(name, end, first_block, keys, tuple(frames)), unnamed


def _check_footer(nbytes: int, frames: int) -> None:
    if nbytes > FOOTER_NBYTES_MAX:
        raise InvalidRequest(f"the footer of {frames} frames takes {nbytes} bytes")


def name_sealed(headers: Sequence[FrameHeader], names: SealedNames) -> Run:
    """Return the run that `headers` make, as it is called and as large as `seal_run` makes it.

    Raises InvalidRequest if these are not frames of one run, ObjectFailed without keys.
    """
    tenant = names.keys.tenant
    plain = [replace(header, tenant=tenant, sequence=SEQUENCE) for header in headers]
    run, unnamed = _unnamed_run(plain, tenant)
    name = RunName(
        names.namespace(plain[0].namespace_id),
        names.key(run.name.first),
        names.key(run.name.last),
        names.nonce(b"".join(map(pack_header, unnamed))),
        names.prefix,
    )
    footer = padded(sum(map(footer_record_nbytes, plain))) + PAGE_NBYTES
    _check_footer(footer, len(run.frames))
    return replace(run, name=name, nbytes=run.nbytes + footer, key=names.keys.new_key())


def seal_run(run: Run, payloads: Sequence[Sequence[memoryview]]) -> tuple[Run, list[memoryview]]:
    """Return the run with its seals, and the encrypted object, in pieces. Blocking.

    payloads: of each frame, its blocks' stored bytes, padded; they stay as they are.
    """
    name, key, frames, pieces, packed = run.name, run.key, [], list[memoryview](), []
    assert key is not None
    for (offset, header), payload in zip(run.frames, payloads, strict=True):
        body = memoryview(bytearray(header.nbytes - PAGE_NBYTES + TAG_NBYTES))
        blocks = tuple(
            seal_block(header, at, key, source, body[start - PAGE_NBYTES :])
            for at, (start, source) in enumerate(zip(header.offsets, payload, strict=True))
        )
        sealed = replace(header, blocks=blocks)
        frames.append(PlacedFrame(offset, sealed))
        pieces += [memoryview(encode_header(sealed, name.tag, offset, key)), body[:-TAG_NBYTES]]
        packed.append(pack_header(plain_page(sealed, name.tag, offset, SEALED)))
    end = sum(map(len, pieces))
    footer = encode_footer(name.tag, end, packed, SEQUENCE, key=key)
    return replace(run, frames=tuple(frames)), [*pieces, memoryview(footer)]


def read_trailer(
    name: RunName, nbytes: int, page: memoryview, key: SegmentKey | None = None
) -> Trailer:
    """Parse the last page of an object of `nbytes` bytes. Raises CorruptBlock."""
    trailer = parse_trailer(page, name.tag, key)
    if trailer is None or trailer.file_nbytes != nbytes:
        raise CorruptBlock(f"{_short(name)}: no trailer of this format for {nbytes} bytes")
    if trailer.footer_nbytes > FOOTER_NBYTES_MAX:
        raise CorruptBlock(f"{_short(name)}: a footer of {trailer.footer_nbytes} bytes")
    return trailer


def read_footer(
    name: RunName,
    nbytes: int,
    trailer: Trailer,
    body: memoryview,
    *,
    names: Names | None = None,
    key: SegmentKey | None = None,
) -> Run:
    """Parse the footer of an object. Raises CorruptBlock unless everything is consistent."""
    names = names or Names()
    found = parse_footer(body, trailer, name.tag, key)
    if not found:
        raise CorruptBlock(f"{_short(name)}: the footer does not list its frames")
    frames = [PlacedFrame(*frame) for frame in found]
    problem, first_block, keys = _chain(frames, key.tenant if key is not None else NO_TENANT)
    ends = [offset + header.nbytes for offset, header in frames]
    if [0, *ends] != [*(offset for offset, _ in frames), trailer.footer_offset]:
        problem = "the frames do not stand back to back"
    elif names.namespace(frames[0].header.namespace_id) != name.namespace_id:
        problem = "another namespace"
    if problem or (names.key(keys[0]), names.key(keys[-1])) != (name.first, name.last):
        raise CorruptBlock(f"{_short(name)}: {problem or 'other keys than in its name'}")
    return Run(name, nbytes, first_block, keys, tuple(frames), key)


def _chain(frames: Sequence[PlacedFrame], tenant: bytes) -> tuple[str, int, tuple[BlockKey, ...]]:
    """Return why the frames are not one run, or "", its first block and all its keys in order."""
    keys: dict[int, BlockKey] = {}
    records: set[tuple[Part, int]] = set()
    namespaces = {header.namespace_id for _, header in frames}
    for _, header in frames:
        if header.is_tombstone or header.sequence != SEQUENCE or header.tenant != tenant:
            return "a frame that is no run of the tenant", 0, ()
        for at, block in enumerate(header.blocks, header.first_block):
            if keys.setdefault(at, block.key) != block.key or (header.part, at) in records:
                return "a record twice, or another key for the same block", 0, ()
            records.add((header.part, at))
    first = min(keys, default=0)
    if len(namespaces) != 1 or set(keys) != set(range(first, first + len(keys))):
        return "several namespaces, or blocks that do not follow each other", 0, ()
    if len(keys) > OBJECT_BLOCKS_MAX:
        return f"{len(keys)} blocks", 0, ()
    for _, header in frames:
        before = keys.get(header.first_block - 1, header.parent)
        if before != header.parent and header.first_block > first:
            return "a frame after another block than the one before it", 0, ()
    return "", first, tuple(keys[at] for at in sorted(keys))


def _short(name: RunName) -> str:
    return f"object {name.first[:4].hex()}..{name.last[:4].hex()}-{name.nonce:016x}"
