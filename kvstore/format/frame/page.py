"""A page that guards itself: the last eight bytes are the checksum of all before."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvstore.model.block import PAGE_NBYTES

BODY_NBYTES = PAGE_NBYTES - 8
U64_MAX = (1 << 64) - 1
_CHECKSUM = struct.Struct("<Q")


class SegmentTag(NamedTuple):
    """Which segment: its number in the directory, and the nonce that seeds its checksums."""

    number: int
    nonce: int


def guard(body: bytes, seed: int) -> bytes:
    """Return the 4 KiB page of `body`: filled up with zeros, then its checksum."""
    filled = body.ljust(BODY_NBYTES, b"\0")
    return filled + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(filled, seed))


def is_guarded(page: bytes | memoryview, seed: int) -> bool:
    """Say whether `page` is a whole page with the checksum it should have."""
    if len(page) != PAGE_NBYTES:
        return False
    (found,) = _CHECKSUM.unpack_from(page, BODY_NBYTES)
    return bool(found == xxhash.xxh3_64_intdigest(page[:BODY_NBYTES], seed))
