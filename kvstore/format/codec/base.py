"""The seam of the codecs."""

from __future__ import annotations

from typing import Protocol

from kvstore.model.block import Buffer
from kvstore.model.errors import CorruptBlock


class Codec(Protocol):
    """Stateless and safe to call from several threads; releases the interpreter lock on large data.

    id: stands in every frame header, persistent. name: what settings call it.
    """

    id: int
    name: str

    def encode(self, raw: memoryview) -> Buffer:
        """Return the stored form of `raw`. It may be larger, and it may alias `raw`."""

    def decode(self, stored: memoryview, target: memoryview) -> None:
        """Fill `target`, which has exactly the raw size, from `stored`.

        Raises CorruptBlock on anything `encode` did not write for that size; `target` is then
        unspecified. Never writes past `target`, never allocates more than its size and a constant.
        """


def fill(target: memoryview, decoded: Buffer) -> None:
    """Copy `decoded` into `target`. Raises CorruptBlock unless it fills it exactly."""
    source = memoryview(decoded).cast("B")
    if len(source) != len(target):
        raise CorruptBlock(f"a block decodes to {len(source)} bytes, not {len(target)}")
    target[:] = source
