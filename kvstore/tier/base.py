"""The interface that every tier implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Place = TypeVar("Place")


Then = Callable[[slice], object]
PART_NBYTES = 512 << 10  # whole leaves of a checksum


class Tier(Protocol[Place]):
    """A bounded set of places that hold bytes. Every method is called on the daemon's event loop.

    A place is an opaque, hashable value. Life of a place: `allocate`, `write`, any number of
    `read`s, `free`. All buffers are page-aligned and hold whole pages of 4 KiB.
    """

    @property
    def capacity_bytes(self) -> int:
        """The cap."""

    @property
    def physical_nbytes(self) -> int:
        """Bytes in use: physical bytes on the medium, plus bytes set aside and not yet written."""

    def allocate(self, nbytes: int) -> Place | None:
        """Set `nbytes` (rounded up to pages) aside. None: no room now. Bookkeeping only."""

    async def write(self, place: Place, buffers: Sequence[memoryview]) -> None:
        """Fill `place` from its start with `buffers`, which stay untouched until it returns.

        Raises Unavailable if the medium refuses; the place can then be written again or freed.
        """

    async def read(
        self,
        place: Place,
        offset: int,
        targets: Sequence[memoryview],
        then: Then | None = None,
        parts: int = 1,
    ) -> None:
        """Fill `targets` one after the other from `offset` of `place`, whole pages.

        Raises Unavailable or CorruptBlock; the targets are then unspecified. Bytes are not
        verified here. The targets belong to the tier until the call returns, cancelled or not.
        then: called with each part that has been read, by the thread that read it, while the bytes
        may still be in the processor's cache.
        parts: how many parts at most, each a multiple of PART_NBYTES and read by its own thread.
        """

    def free(self, place: Place) -> None:
        """Give `place` up while nothing reads or writes it. Raises InvalidRequest if unknown."""
