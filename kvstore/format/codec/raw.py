"""The identity."""

from __future__ import annotations

from kvstore.format.codec.base import fill


class RawCodec:
    """Stores the bytes themselves. Write-behind skips it where it can read straight into a slot."""

    id = 0
    name = "raw"

    def encode(self, raw: memoryview) -> memoryview:
        return raw

    def decode(self, stored: memoryview, target: memoryview) -> None:
        fill(target, stored)
