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


def checksum(data: Buffer) -> int:
    """Return the checksum of `data` (any contiguous buffer)."""
    view = memoryview(data).cast("B")
    leaves = [
        xxhash.xxh3_64_intdigest(view[start : start + LEAF_NBYTES])
        for start in range(0, len(view), LEAF_NBYTES)
    ]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(leaves)}Q", *leaves))


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy equal-sized buffers; numpy lets other threads run meanwhile, a slice assignment not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
