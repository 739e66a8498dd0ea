"""LZ4 blocks without a size prefix: the frame header knows the size, and a prefix could lie."""

from __future__ import annotations

import lz4.block

from kvstore.format.codec.base import fill
from kvstore.model.errors import CorruptBlock


class Lz4Codec:
    """LZ4 block format, default acceleration."""

    id = 1
    name = "lz4"

    def encode(self, raw: memoryview) -> bytes:
        encoded: bytes = lz4.block.compress(raw, store_size=False)
        return encoded

    def decode(self, stored: memoryview, target: memoryview) -> None:
        try:
            decoded = lz4.block.decompress(stored, uncompressed_size=len(target))
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptBlock(f"not an lz4 block of {len(target)} bytes: {error}") from error
        fill(target, decoded)
