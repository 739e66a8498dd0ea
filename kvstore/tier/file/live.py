"""Which blocks of the frames found on disk are live. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.block import BlockKey, NamespaceId, Part
from kvstore.frame import FrameHeader

_Owner = tuple[bytes, NamespaceId]  # tenant and namespace
_Record = tuple[bytes, NamespaceId, Part, BlockKey]


class Deaths:
    """At which sequence keys, and whole namespaces, were killed last."""

    def __init__(self, headers: Iterable[FrameHeader] = ()) -> None:
        self._cleared: dict[_Owner, int] = {}
        self._killed: dict[tuple[_Owner, BlockKey], int] = {}
        for header in headers:
            self.note(header)

    def note(self, header: FrameHeader) -> None:
        """Take a tombstone in; a run kills nothing."""
        owner = (header.tenant, header.namespace_id)
        if header.is_tombstone and not header.killed:
            self._cleared[owner] = max(self._cleared.get(owner, 0), header.sequence)
        for key in header.killed:
            self._killed[owner, key] = max(self._killed.get((owner, key), 0), header.sequence)

    def kill(self, header: FrameHeader, key: BlockKey) -> bool:
        """Say whether a block of a run is dead."""
        owner = (header.tenant, header.namespace_id)
        death = max(self._cleared.get(owner, 0), self._killed.get((owner, key), 0))
        return death >= header.sequence


def live_positions(headers: Sequence[FrameHeader]) -> list[tuple[int, ...]]:
    """Return, for each frame, the positions of its live blocks, ascending.

    A record in several frames is live in the one of the highest sequence (of equal ones the later
    in `headers`), unless a tombstone of a higher sequence names its key or its namespace.
    """
    deaths = Deaths(headers)
    newest: dict[_Record, tuple[int, int]] = {}
    for index, header in enumerate(headers):
        owner = (header.tenant, header.namespace_id)
        for block in header.blocks:
            if not deaths.kill(header, block.key):
                record = (*owner, header.part, block.key)
                newest[record] = max(newest.get(record, (0, 0)), (header.sequence, index))
    return [
        tuple(
            position
            for position, block in enumerate(header.blocks)
            if newest.get((header.tenant, header.namespace_id, header.part, block.key))
            == (header.sequence, index)
        )
        for index, header in enumerate(headers)
    ]
