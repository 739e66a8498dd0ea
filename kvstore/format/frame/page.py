"""A page that guards itself: the last eight bytes are the checksum of all before."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvstore.model.block import PAGE_NBYTES

BODY_NBYTES = PAGE_NBYTES - 8
SEALED_VERSION = 2  # of segments, frames and trailers that are encrypted
U64_MAX = (1 << 64) - 1
_CHECKSUM = struct.Struct("<Q")


class SegmentTag(NamedTuple):
    """Which segment: its number in the directory, and the nonce that seeds its checksums."""

    number: int
    nonce: int


def guard(body: bytes, seed: int, body_nbytes: int = BODY_NBYTES) -> bytes:
    """Return the page of `body`: filled up with zeros, then its checksum."""
    filled = body.ljust(body_nbytes, b"\0")
    return filled + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(filled, seed))


def is_guarded(page: bytes | memoryview, seed: int, body_nbytes: int = BODY_NBYTES) -> bool:
    """Say whether `page` is a whole page with the checksum it should have."""
    if len(page) != body_nbytes + _CHECKSUM.size:
        return False
    (found,) = _CHECKSUM.unpack_from(page, body_nbytes)
    return bool(found == xxhash.xxh3_64_intdigest(page[:body_nbytes], seed))
