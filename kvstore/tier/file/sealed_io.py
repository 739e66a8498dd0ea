"""Frames of format 2, between buffers of plain bytes and the file. Blocking, for a thread.

Bytes are encrypted into, and decrypted from, bounce buffers: the plain bytes of a slot never reach
the disk, and what was read reaches a slot only when its tag is right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
from kvstore.tier.file.segment import FileExtent, Measured, chunks
from kvstore.tier.file.segment_file import SegmentFiles, segment_name

CHUNK_NBYTES = 4 << 20  # of blocks that are read or written at once


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


def write_sealed(
    files: SegmentFiles,
    target: Target,
    header: FrameHeader,
    buffers: Sequence[memoryview],
    bounces: Bounces,
) -> tuple[Measured, bytes]:
    """Encrypt and write a frame; return what the file then takes, and the packed header.

    buffers: the header's page, which is filled here, then one for each block.
    """
    (tag, fd, key, offset), (page, *payload) = target, buffers
    if [len(each) for each in payload] != [padded(b.stored_nbytes) for b in header.blocks]:
        raise InvalidRequest("a sealed frame takes one buffer for each block")
    header = replace(header, tenant=key.tenant)
    parts = list(chunks(header, range(len(header.blocks)), CHUNK_NBYTES))
    at, measured = offset + PAGE_NBYTES, None
    for positions in parts:
        nbytes = sum(padded(header.blocks[each].stored_nbytes) for each in positions)
        with bounces.taken(nbytes) as bounce:
            header = _seal(header, positions, payload, bounce, key)
            if len(parts) == 1:  # all of it in one call
                page[:] = encode_header(header, tag, offset, key)
                measured = files.write(tag, fd, [page, bounce[:nbytes]], offset)
            else:
                files.write(tag, fd, [bounce[:nbytes]], at)
                at += nbytes
    if measured is None:
        page[:] = encode_header(header, tag, offset, key)
        measured = files.write(tag, fd, [page], offset)
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
    filled. A block with a wrong tag leaves zeros. Reads of whole blocks into targets that hold
    whole blocks take no detour.
    """

    def __init__(
        self,
        files: SegmentFiles,
        place: tuple[SegmentTag, FileExtent, SegmentKey],
        offset: int,
        targets: Sequence[memoryview],
        bounces: Bounces,
    ) -> None:
        self._files = files
        self._place = place
        self._tag, self._extent, self._key = place
        self._offset = offset
        self._targets = [target.cast("B") for target in targets]
        self._bounces = bounces
        self.then: Then | None = None
        self.nbytes = sum(map(len, self._targets))
        self._lock = threading.Lock()
        self._left = 0

    @property
    def may_be_split(self) -> bool:
        """Whether several threads may read it: one target, that fits into a bounce buffer."""
        return len(self._targets) == 1 and self.nbytes <= CHUNK_NBYTES

    def run(self) -> None:
        """Read all of it. Raises CorruptBlock, of which WrongTag; DiskFailed."""
        if self.nbytes > CHUNK_NBYTES:
            self._run_in_chunks()
            return
        with self._bounces.taken(PAGE_NBYTES + self.nbytes) as bounce:
            page, stored = bounce[:PAGE_NBYTES], bounce[PAGE_NBYTES:]
            if self._offset == PAGE_NBYTES:  # the page is right before them
                self._read([bounce[: PAGE_NBYTES + self.nbytes]], 0)
            else:
                self._read([page], 0)
                self._read([stored[: self.nbytes]], self._offset)
            self._open_all(self._header(page), stored)

    def parts(self, step: int, bounce: memoryview) -> Iterator[Callable[[], None]]:
        """Yield what several threads do at once; the last of them decrypts.

        bounce: as `Bounces.taken` gives it for a page and all targets.
        """
        starts = range(0, self.nbytes, step)
        self._left = len(starts)
        for at in starts:
            yield partial(self._run_part, bounce, at, min(at + step, self.nbytes))

    def _run_part(self, bounce: memoryview, begin: int, end: int) -> None:
        page, stored = bounce[:PAGE_NBYTES], bounce[PAGE_NBYTES:]
        if not begin:
            self._read([page], 0)
        self._read([stored[begin:end]], self._offset + begin)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._open_all(self._header(page), stored)

    def _open_all(self, header: FrameHeader, stored: memoryview) -> None:
        """Decrypt what is in `stored`, from the read's offset on."""
        positions = self._positions(header)
        if positions is None:
            self._run_by_detour(header)
        else:
            self._finish(self._open(header, positions, stored))

    def _run_in_chunks(self) -> None:
        with self._bounces.taken(PAGE_NBYTES) as bounce:
            self._read([bounce[:PAGE_NBYTES]], 0)
            header = self._header(bounce[:PAGE_NBYTES])
        positions = self._positions(header)
        if positions is None:
            self._run_by_detour(header)
            return
        wrong: list[int] = []
        for some in chunks(header, positions, CHUNK_NBYTES):
            nbytes = sum(padded(header.blocks[each].stored_nbytes) for each in some)
            with self._bounces.taken(nbytes) as bounce:
                self._read([bounce[:nbytes]], header.offsets[some[0]])
                wrong += self._open(header, some, bounce)
        self._finish(wrong)

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
        plain = memoryview(bytearray(sum(whole[-1]) - first))
        wrong: Sequence[int] = ()
        try:
            SealedRead(self._files, self._place, first, [plain], self._bounces).run()
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
        header = parse_header(page, self._tag, self._extent.offset, self._key)
        if header is None:
            raise CorruptBlock(f"{segment_name(self._tag)}: a header with a wrong tag")
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

    def _open(self, header: FrameHeader, positions: Sequence[int], stored: memoryview) -> list[int]:
        """Decrypt some blocks, which are in `stored` one after the other; return those with a wrong
        tag. The last one first: its tag is put where the next one has been."""
        first = header.offsets[positions[0]]
        return [
            position
            for position in reversed(positions)
            if not open_block(
                header,
                position,
                self._key,
                stored[header.offsets[position] - first :],
                self._target(header.offsets[position], header.blocks[position].stored_nbytes),
            )
        ]

    def _target(self, offset: int, nbytes: int) -> memoryview:
        """Return where the block at `offset` of the frame goes. The rest of its page is zeros."""
        at, target = offset - self._offset, self._targets[0]
        for target in self._targets:
            if at < len(target):
                break
            at -= len(target)
        padding = target[at + nbytes : at + padded(nbytes)]
        padding[:] = bytes(len(padding))
        return target[at : at + nbytes]

    def _finish(self, wrong: Sequence[int]) -> None:
        if self.then is not None:
            self.then(slice(0, self.nbytes))
        if wrong:
            raise WrongTag(segment_name(self._tag), wrong)
