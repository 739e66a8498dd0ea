"""The checksum that travels with every record, from the writer's slot to the reader's copy.

XXH3-64 over the little-endian XXH3-64s of the record's 64 KiB leaves. Two levels, because leaves
can be hashed by several cores, or on a GPU, and a large record can be verified piece by piece.

The native library does the same in one call that lets other threads run; the functions below call
it for what is large enough, where it is there. It reads a source once, and sums up what it stores:
that is what was meant, and what has arrived.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from kvstore.model.block import Buffer
from kvstore_kernels import native
from kvstore_kernels.native import sums

LEAF_NBYTES = sums.LEAF_NBYTES
PIECE_NBYTES = 8 * LEAF_NBYTES  # copied, then hashed while the processor's cache still has it


def checksum(data: Buffer) -> int:
    """Return the checksum of `data` (any contiguous buffer)."""
    return checksum_of(leaves_of(memoryview(data).cast("B")))


def checksums(records: Sequence[memoryview]) -> list[int]:
    """Return the checksum of each record: in one call, if the native library is there."""
    if _natively(sum(map(len, records))):
        return sums.sums_of(records)
    return [checksum(record) for record in records]


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy equal-sized buffers; numpy lets other threads run meanwhile, a slice assignment not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_in(source: memoryview, target: memoryview) -> int:
    """Copy equal-sized buffers of bytes; return the checksum of the source: what was meant."""
    return copies_in([source], [target])[0]


def copy_out(source: memoryview, target: memoryview) -> int:
    """The same; return the checksum of what has arrived, whoever wrote to the source meanwhile."""
    return copies_out([source], [target])[0]


def copies_in(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> list[int]:
    """Copy each source to the target of its size; return the checksums of the sources."""
    if _natively(sum(map(len, sources))):
        return sums.copies(sources, targets)
    return [copy_gathered([source], to) for source, to in zip(sources, targets, strict=True)]


def copies_out(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> list[int]:
    """The same; return the checksums of what has arrived."""
    if _natively(sum(map(len, sources))):
        return sums.copies(sources, targets)
    return [copy_scattered(source, [to]) for source, to in zip(sources, targets, strict=True)]


def shared_copies(
    sources: Sequence[memoryview], targets: Sequence[memoryview]
) -> sums.SharedCopies | None:
    """The same by several threads together; None without the native library."""
    return None if native.library() is None else sums.SharedCopies(sources, targets)


def received(fd: int, targets: Sequence[memoryview]) -> list[int] | None:
    """Fill targets from a socket that blocks, one behind the other; return the checksums of what
    has come. None: nothing was done, because the native library is not there.

    Raises EOFError if the other side ends the connection first, and OSError: BlockingIOError after
    a silence as long as the socket's timeout.
    """
    return sums.received(fd, targets) if native.library() is not None else None


def copy_gathered(sources: Sequence[memoryview], target: memoryview) -> int:
    """Copy pieces of bytes one behind the other into a target as long as all of them; return the
    checksum of the whole as it was meant: of the sources."""
    return _copy_pieces(zip(sources, _cut(target, sources), strict=True), arrived=False)


def copy_scattered(source: memoryview, targets: Sequence[memoryview]) -> int:
    """Copy bytes into pieces that together are as long; return the checksum of what has arrived
    there."""
    return _copy_pieces(zip(_cut(source, targets), targets, strict=True), arrived=True)


class PiecewiseChecksum:
    """The checksum of bytes that come piece by piece; fastest if pieces end where leaves do."""

    def __init__(self) -> None:
        self._leaves: list[int] = []
        self._open = xxhash.xxh3_64()  # a leaf that has begun
        self._open_nbytes = 0

    def add(self, piece: memoryview) -> None:
        if self._open_nbytes:
            first = piece[: LEAF_NBYTES - self._open_nbytes]
            piece = piece[len(first) :]
            self._add_open(first)
        whole = len(piece) - len(piece) % LEAF_NBYTES
        if whole:
            self._leaves += leaves_of(piece[:whole])
        if whole < len(piece):
            self._add_open(piece[whole:])

    @property
    def value(self) -> int:
        left = [self._open.intdigest()] if self._open_nbytes else []
        return checksum_of([*self._leaves, *left])

    def _add_open(self, piece: memoryview) -> None:
        self._open.update(piece)
        self._open_nbytes += len(piece)
        if self._open_nbytes == LEAF_NBYTES:
            self._leaves.append(self._open.intdigest())
            self._open.reset()
            self._open_nbytes = 0


def leaves_of(view: memoryview) -> list[int]:
    """Return the checksums of leaves: a record's, or of a piece that begins where a leaf does."""
    if _natively(len(view)):
        return sums.leaves_of(view)
    return [
        xxhash.xxh3_64_intdigest(view[start : start + LEAF_NBYTES])
        for start in range(0, len(view), LEAF_NBYTES)
    ]


def checksum_of(leaves: Sequence[int]) -> int:
    """Return the checksum of a record with these leaves."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(leaves)}Q", *leaves))


def _natively(nbytes: int) -> bool:
    """Say whether the native library is there, and worth its call."""
    return nbytes >= sums.WORTHWHILE_NBYTES and native.library() is not None


def _copy_pieces(pairs: Iterable[tuple[memoryview, memoryview]], *, arrived: bool) -> int:
    """Copy each source to its target; return the checksum of all together."""
    found = PiecewiseChecksum()
    for source, target in pairs:
        for start in range(0, len(source), PIECE_NBYTES):
            piece = slice(start, start + PIECE_NBYTES)
            copy_bytes(source[piece], target[piece])
            found.add((target if arrived else source)[piece])
    return found.value


def _cut(whole: memoryview, pieces: Sequence[memoryview]) -> list[memoryview]:
    """Cut memory into parts as long as `pieces`. Raises ValueError unless all have its length."""
    if sum(map(len, pieces)) != len(whole):
        raise ValueError("a record and where it is copied to differ in size")
    ends = list(itertools.accumulate(map(len, pieces), initial=0))
    return [whole[begin:end] for begin, end in itertools.pairwise(ends)]
