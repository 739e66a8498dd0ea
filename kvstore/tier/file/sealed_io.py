"""Frames of format 2, between buffers of plain bytes and the file. Blocking, for a thread.

Bytes are encrypted into bounce buffers: the plain bytes of a slot never reach the disk. They are
read into their slots, which nobody else reads yet, and decrypted there: that takes the memory's
time once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvstore.format.frame import (
    FrameHeader,
    SegmentKey,
    SegmentTag,
    encode_header,
    open_block,
    pack_header,
    parse_header,
    seal_block,
)
from kvstore.format.frame.header import SEALED, plain_page
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.errors import CorruptBlock, InvalidRequest
from kvstore.tier.base import Then
from kvstore.tier.bounces import Bounces
from kvstore.tier.file.pages import aligned_buffer
from kvstore.tier.file.segment import FileExtent, Measured, chunks
from kvstore.tier.file.segment_file import SegmentFiles, segment_name

WRITE_CHUNK_NBYTES = 8 << 20  # of blocks that are encrypted and written at once
SPLIT_NBYTES_MAX = 4 << 20  # of a read by several threads
HEADERS_MAX = 128  # of frames that are read block by block


class WrongTag(CorruptBlock):
    """Some blocks of a frame are not what was stored. positions: theirs in the frame."""

    def __init__(self, segment: str, positions: Sequence[int]) -> None:
        super().__init__(f"{segment}: {len(positions)} blocks have a wrong tag")
        self.positions = positions


class Target(NamedTuple):
    """Where a frame is written: the segment, its descriptor, its key, the frame's offset."""

    tag: SegmentTag
    fd: int
    key: SegmentKey
    offset: int


class Headers:
    """The headers of frames of one directory that were read lately: their blocks are often read one
    by one. Nothing is written where a frame was, so they stay right. Any thread may use them."""

    def __init__(self, kept: int = HEADERS_MAX) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[SegmentTag, int], FrameHeader] = OrderedDict()
        self._coming: set[tuple[SegmentTag, int]] = set()

    @contextmanager
    def coming(self, tag: SegmentTag, offset: int) -> Iterator[bool]:
        """Say that a header is being read; False: another thread reads it. Then the blocks are read
        before the header is asked for again: several blocks of a frame are often read at once."""
        with self._lock:
            is_first = (tag, offset) not in self._coming
            self._coming.add((tag, offset))
        try:
            yield is_first
        finally:
            if is_first:
                with self._lock:
                    self._coming.discard((tag, offset))

    def get(self, tag: SegmentTag, offset: int) -> FrameHeader | None:
        with self._lock:
            header = self._found.get((tag, offset))
            if header is not None:
                self._found.move_to_end((tag, offset))
            return header

    def note(self, tag: SegmentTag, offset: int, header: FrameHeader) -> None:
        """Keep a header whose seal was right, for a while."""
        with self._lock:
            self._found[tag, offset] = header
            if len(self._found) > self._kept:
                self._found.popitem(last=False)


def write_sealed(
    files: SegmentFiles,
    target: Target,
    header: FrameHeader,
    buffers: Sequence[memoryview],
    bounces: Bounces,
) -> tuple[Measured, bytes]:
    """Encrypt and write a frame; return what the file then takes, and the packed header.

    buffers: the header's page, which is filled here, then one for each block. The page has the
    seals of all blocks, so it is written with the first of them, last.
    """
    (tag, fd, key, offset), (page, *payload) = target, buffers
    if [len(each) for each in payload] != [padded(b.stored_nbytes) for b in header.blocks]:
        raise InvalidRequest("a sealed frame takes one buffer for each block")
    header = replace(header, tenant=key.tenant)
    parts = list(chunks(header, range(len(header.blocks)), WRITE_CHUNK_NBYTES))
    for positions in reversed(parts[1:]):
        nbytes = _nbytes(header, positions)
        at = offset + header.offsets[positions[0]]
        with bounces.taken(nbytes) as bounce:
            header = _seal(header, positions, payload, bounce, key)
            files.write(tag, fd, [bounce[:nbytes]], at)
    first = parts[0] if parts else []  # a tombstone has no blocks
    nbytes = _nbytes(header, first)
    with bounces.taken(max(1, nbytes)) as bounce:
        header = _seal(header, first, payload, bounce, key)
        page[:] = encode_header(header, tag, offset, key)
        measured = files.write(tag, fd, [page, bounce[:nbytes]], offset)
    return measured, pack_header(plain_page(header, tag, offset, SEALED))


def _seal(
    header: FrameHeader,
    positions: Sequence[int],
    payload: Sequence[memoryview],
    bounce: memoryview,
    key: SegmentKey,
) -> FrameHeader:
    """Encrypt some blocks into `bounce`, one after the other; return the header with their
    seals."""
    blocks, at = list(header.blocks), 0
    for position in positions:
        nbytes = blocks[position].stored_nbytes
        blocks[position] = seal_block(header, position, key, payload[position], bounce[at:])
        at += padded(nbytes)
    return replace(header, blocks=tuple(blocks))


class SealedRead:
    """One read of a frame, in one part or by several threads.

    targets: filled from `offset` of the frame with plain bytes. then: called once, when all are
    filled. A block with a wrong tag leaves zeros. Whole blocks are read into targets that hold
    whole blocks, and decrypted there.
    """

    def __init__(
        self,
        files: SegmentFiles,
        place: tuple[SegmentTag, FileExtent, SegmentKey],
        offset: int,
        targets: Sequence[memoryview],
        bounces: Bounces,
        *,
        headers: Headers,
    ) -> None:
        self._files = files
        self._headers = headers
        self._place = place
        self._tag, self._extent, self._key = place
        self._offset = offset
        self._targets = [target.cast("B") for target in targets]
        self._bounces = bounces
        self.then: Then | None = None
        self.nbytes = sum(map(len, self._targets))
        self._lock = threading.Lock()
        self._left = 0
        self._first: FrameHeader | None = None  # what the first of several parts has found

    @property
    def may_be_split(self) -> bool:
        """Whether several threads may read it. One of them decrypts."""
        return len(self._targets) == 1 and self.nbytes <= SPLIT_NBYTES_MAX

    def run(self) -> None:
        """Read all of it. Raises CorruptBlock, of which WrongTag; DiskFailed."""
        with self._bounces.taken(PAGE_NBYTES) as bounce:
            page = bounce[:PAGE_NBYTES]
            if self._offset == PAGE_NBYTES:  # the page is right before them
                self._read([page, *self._targets], 0)
                header = self._parsed(page)
            else:
                early = self._early_header(page)
                self._read(self._targets, self._offset)
                header = early or self._header(page)
        self._open_all(header)

    def parts(self, step: int) -> Iterator[Callable[[], None]]:
        """Yield what several threads do at once; the last of them decrypts."""
        starts = range(0, self.nbytes, step)
        self._left = len(starts)
        for at in starts:
            yield partial(self._run_part, at, min(at + step, self.nbytes))

    def _run_part(self, begin: int, end: int) -> None:
        if not begin:
            with self._bounces.taken(PAGE_NBYTES) as bounce:
                self._first = self._header(bounce[:PAGE_NBYTES])
        self._read([self._targets[0][begin:end]], self._offset + begin)
        with self._lock:
            self._left -= 1
            if self._left or self._first is None:  # another one failed
                return
        self._open_all(self._first)

    def _open_all(self, header: FrameHeader) -> None:
        """Decrypt what has been read."""
        positions = self._positions(header)
        if positions is None:
            self._run_by_detour(header)
        else:
            self._finish([each for each in positions if not self._open(header, each)])

    def _run_by_detour(self, header: FrameHeader) -> None:
        """Read the blocks that the targets are parts of, and copy."""
        end = self._offset + self.nbytes
        sizes = [padded(block.stored_nbytes) for block in header.blocks]
        whole = [
            (at, size)
            for at, size in zip(header.offsets, sizes, strict=True)
            if at < end and at + size > self._offset
        ]
        if not whole or whole[0][0] > self._offset or sum(whole[-1]) < end:
            raise InvalidRequest("a read of a sealed frame, beyond its blocks")
        first = whole[0][0]
        plain = aligned_buffer(sum(whole[-1]) - first)
        wrong: Sequence[int] = ()
        try:
            read = SealedRead(
                self._files, self._place, first, [plain], self._bounces, headers=self._headers
            )
            read.run()
        except WrongTag as error:
            wrong = error.positions
        at = self._offset - first
        for target in self._targets:
            target[:] = plain[at : at + len(target)]
            at += len(target)
        self._finish(wrong)

    def _read(self, targets: Sequence[memoryview], offset: int) -> None:
        self._files.read(self._tag, targets, self._extent.offset + offset)

    def _header(self, page: memoryview) -> FrameHeader:
        """Return the frame's header, known or read into `page`."""
        known = self._headers.get(self._tag, self._extent.offset)
        if known is not None:
            return known
        self._read([page], 0)
        return self._parsed(page)

    def _early_header(self, page: memoryview) -> FrameHeader | None:
        """Return the same before the blocks are read; None: another thread reads it."""
        with self._headers.coming(self._tag, self._extent.offset) as is_first:
            return self._header(page) if is_first else None

    def _parsed(self, page: memoryview) -> FrameHeader:
        header = parse_header(page, self._tag, self._extent.offset, self._key)
        if header is None:
            raise CorruptBlock(f"{segment_name(self._tag)}: a header with a wrong tag")
        self._headers.note(self._tag, self._extent.offset, header)
        return header

    def _positions(self, header: FrameHeader) -> range | None:
        """Return the blocks to read; None unless each target is for some whole ones."""
        if self._offset not in header.offsets:
            return None
        first = at = header.offsets.index(self._offset)
        for target in self._targets:
            left = len(target)
            while left > 0 and at < len(header.blocks):
                left -= padded(header.blocks[at].stored_nbytes)
                at += 1
            if left:
                return None
        return range(first, at)

    def _open(self, header: FrameHeader, position: int) -> bool:
        """Decrypt a block in its target; False if its tag is wrong. The rest of its last page is
        zeros."""
        at = header.offsets[position] - self._offset
        nbytes, target = header.blocks[position].stored_nbytes, self._targets[0]
        for target in self._targets:
            if at < len(target):
                break
            at -= len(target)
        padding = target[at + nbytes : at + padded(nbytes)]
        padding[:] = bytes(len(padding))
        return open_block(header, position, self._key, target[at:])

    def _finish(self, wrong: Sequence[int]) -> None:
        if self.then is not None:
            self.then(slice(0, self.nbytes))
        if wrong:
            raise WrongTag(segment_name(self._tag), wrong)


def _nbytes(header: FrameHeader, positions: Sequence[int]) -> int:
    """Return what some blocks take in the frame."""
    return sum(padded(header.blocks[each].stored_nbytes) for each in positions)
