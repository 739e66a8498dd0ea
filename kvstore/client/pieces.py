"""A record whose bytes lie in several places of the caller's memory, as engines keep their pages.

    client.put(namespace_id, [key], [Pieces([keys_of_the_page, values_of_the_page])])

Its record is the pieces one behind the other. They go to and from the arena with one copy, as a
record in one place does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvstore.model.block import Buffer
from kvstore.model.checksum import copy_gathered, copy_scattered
from kvstore.model.errors import InvalidRequest


class Pieces:
    """Some pieces of memory, in the order in which they make a record."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """Raises InvalidRequest for a buffer that is not in one piece itself."""
        views = [memoryview(each) for each in buffers]
        if not all(view.c_contiguous for view in views):
            raise InvalidRequest("a piece of a record is not contiguous")
        self.views = tuple(view.cast("B") for view in views if view.nbytes)
        self.nbytes = sum(map(len, self.views))

    def __len__(self) -> int:
        return self.nbytes

    @property
    def readonly(self) -> bool:
        return any(view.readonly for view in self.views)

    def joined(self) -> memoryview:
        """Return a copy in one piece."""
        return memoryview(b"".join(self.views))


Memory: TypeAlias = memoryview | Pieces
"""Of one record, in bytes."""


def nbytes_of(record: Buffer | Pieces) -> int:
    return record.nbytes if isinstance(record, Pieces) else memoryview(record).nbytes


def joined(record: Memory) -> memoryview:
    """Return a record in one piece."""
    return record.joined() if isinstance(record, Pieces) else record


def copy_to_slot(record: Pieces, slot: memoryview) -> int:
    """Copy a record into a slot of its size; return the checksum of the record."""
    return copy_gathered(record.views, slot)


def copy_from_slot(slot: memoryview, target: Pieces) -> int:
    """Copy a slot to a target of its size; return the checksum of the target."""
    return copy_scattered(slot, target.views)
