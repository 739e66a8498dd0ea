"""Which blocks of the frames found on disk are live. Pure.

All of them are one tenant's: frames of others do not open. What is not encrypted, or not written
yet, does not say whose it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.format.frame import FrameHeader
from kvstore.model.block import BlockKey, NamespaceId, Part

_Record = tuple[NamespaceId, Part, BlockKey]


class Deaths:
    """The highest sequence that killed each key, and each whole namespace."""

    def __init__(self, headers: Iterable[FrameHeader] = ()) -> None:
        self._cleared: dict[NamespaceId, int] = {}
        self._killed: dict[tuple[NamespaceId, BlockKey], int] = {}
        for header in headers:
            self.note(header)

    def note(self, header: FrameHeader) -> None:
        """Add a tombstone; a run changes nothing."""
        space = header.namespace_id
        if header.is_tombstone and not header.killed:
            self._cleared[space] = max(self._cleared.get(space, 0), header.sequence)
        for key in header.killed:
            self._killed[space, key] = max(self._killed.get((space, key), 0), header.sequence)

    def live(self, header: FrameHeader) -> tuple[int, ...]:
        """Return the positions of a run's blocks that nothing killed."""
        space = header.namespace_id
        if self._cleared.get(space, 0) >= header.sequence:
            return ()
        if not self._killed:
            return tuple(range(len(header.blocks)))
        return tuple(
            position
            for position, block in enumerate(header.blocks)
            if self._killed.get((space, block.key), 0) < header.sequence
        )


def live_positions(headers: Sequence[FrameHeader]) -> list[tuple[int, ...]]:
    """Return, for each frame, the positions of its live blocks, ascending.

    A record in several frames is live in the one of the highest sequence (of equal ones the later
    in `headers`), unless a tombstone of a higher sequence names its key or its namespace.
    """
    deaths = Deaths(headers)
    newest: dict[_Record, tuple[int, int]] = {}
    for index, header in enumerate(headers):
        for position in deaths.live(header):
            key = header.blocks[position].key
            record = (header.namespace_id, header.part, key)
            newest[record] = max(newest.get(record, (0, 0)), (header.sequence, index))
    return [
        tuple(
            position
            for position, block in enumerate(header.blocks)
            if newest.get((header.namespace_id, header.part, block.key)) == (header.sequence, index)
        )
        for index, header in enumerate(headers)
    ]
