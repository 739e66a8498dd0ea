"""The checksum that travels with every record, from the writer's slot to the reader's copy.

XXH3-64 over the little-endian XXH3-64s of the record's 64 KiB leaves. Two levels, because leaves
can be hashed by several cores, or on a GPU, and a large record can be verified piece by piece.

The native library does the same in one call that lets other threads run; the functions below call
it for what is large enough, where it is there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

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


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy equal-sized buffers; numpy lets other threads run meanwhile, a slice assignment not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_in(source: memoryview, target: memoryview) -> int:
    """Copy equal-sized buffers of bytes; return the checksum of the source: what was meant."""
    return copies_in([source], [target])[0]


def copy_out(source: memoryview, target: memoryview) -> int:
    """The same; return the checksum of the target: what has arrived."""
    return copies_out([source], [target])[0]


def copies_in(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> list[int]:
    """Copy each source to the target of its size; return the checksums of the sources."""
    if _natively(sum(map(len, sources))):
        return sums.copies(sources, targets, arrived=False)
    return [_copy(source, to, source) for source, to in zip(sources, targets, strict=True)]


def copies_out(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> list[int]:
    """The same; return the checksums of the targets."""
    if _natively(sum(map(len, sources))):
        return sums.copies(sources, targets, arrived=True)
    return [_copy(source, to, to) for source, to in zip(sources, targets, strict=True)]


class PiecewiseChecksum:
    """The checksum of bytes that come piece by piece, each but the last of whole leaves."""

    def __init__(self) -> None:
        self._leaves: list[int] = []

    def add(self, piece: memoryview) -> None:
        self._leaves += leaves_of(piece)

    @property
    def value(self) -> int:
        return checksum_of(self._leaves)


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


def _copy(source: memoryview, target: memoryview, hashed: memoryview) -> int:
    found = PiecewiseChecksum()
    for start in range(0, len(source), PIECE_NBYTES):
        piece = slice(start, start + PIECE_NBYTES)
        copy_bytes(source[piece], target[piece])
        found.add(hashed[piece])
    return found.value
