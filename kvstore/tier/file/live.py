"""Which blocks of the frames found on disk are live. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.block import BlockKey, NamespaceId, Part
from kvstore.frame import FrameHeader

_Owner = tuple[bytes, NamespaceId]  # tenant and namespace
_Record = tuple[bytes, NamespaceId, Part, BlockKey]


def live_positions(headers: Sequence[FrameHeader]) -> list[tuple[int, ...]]:
    """Return, for each frame, the positions of its live blocks, ascending.

    A record in several frames is live in the one of the highest sequence (of equal ones the later
    in `headers`), unless a tombstone of a higher sequence names its key or its namespace.
    """
    cleared, killed = _tombstones(headers)
    newest: dict[_Record, tuple[int, int]] = {}
    for index, header in enumerate(headers):
        owner = (header.tenant, header.namespace_id)
        for block in header.blocks:
            death = max(cleared.get(owner, 0), killed.get((owner, block.key), 0))
            if death < header.sequence:
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


def _tombstones(
    headers: Sequence[FrameHeader],
) -> tuple[dict[_Owner, int], dict[tuple[_Owner, BlockKey], int]]:
    """Return the highest sequence at which each namespace, and each key, was killed."""
    cleared: dict[_Owner, int] = {}
    killed: dict[tuple[_Owner, BlockKey], int] = {}
    for header in headers:
        owner = (header.tenant, header.namespace_id)
        if header.is_tombstone and not header.killed:
            cleared[owner] = max(cleared.get(owner, 0), header.sequence)
        for key in header.killed:
            killed[owner, key] = max(killed.get((owner, key), 0), header.sequence)
    return cleared, killed
