"""The checksum that travels with every record, from the writer's slot to the reader's copy.

XXH3-64 over the little-endian XXH3-64s of the record's 64 KiB leaves. Two levels, because leaves
can be hashed by several cores, or on a GPU, and a large record can be verified piece by piece.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from kvstore.block import Buffer

LEAF_NBYTES = 64 * 1024
_PIECE_NBYTES = 4 * LEAF_NBYTES  # fits into a core's L2 cache twice


def checksum(data: Buffer) -> int:
    """Return the checksum of `data` (any contiguous buffer)."""
    return _root(_leaves(memoryview(data).cast("B")))


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy equal-sized buffers; numpy lets other threads run meanwhile, a slice assignment not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_and_checksum(source: memoryview, target: memoryview, *, of_target: bool) -> int:
    """Copy equal-sized byte buffers; return the checksum of `source`, or of what `target` has then.

    It is taken piece by piece behind the copy, while the bytes are in the processor's cache.
    """
    hashed = target if of_target else source
    leaves: list[int] = []
    for start in range(0, len(source), _PIECE_NBYTES):
        piece = slice(start, start + _PIECE_NBYTES)
        copy_bytes(source[piece], target[piece])
        leaves += _leaves(hashed[piece])
    return _root(leaves)


def _leaves(view: memoryview) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(view[start : start + LEAF_NBYTES])
        for start in range(0, len(view), LEAF_NBYTES)
    ]


def _root(leaves: list[int]) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(leaves)}Q", *leaves))
